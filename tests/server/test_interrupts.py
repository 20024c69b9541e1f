"""Ctrl-C at any moment of a command, and closed standard streams: no traceback."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
from serving import Servers
from terminal import Terminal

from penstock import demo

MOMENTS = [0.15 * number for number in range(20)]
"""Seconds from the entry point to Ctrl-C."""
CONCURRENT = 3
"""Number of commands that run at the same time: most of them wait for their moment."""
ENTRY = """
import sys
shown = []
def report(event, args):
    if event == "import" and args[0] == "penstock.cli.main" and not shown:
        shown.append(print("called", flush=True))
sys.addaudithook(report)
from penstock.cli.entry import main
sys.exit(main())
"""
"""Prints a line once the entry point is called: before, Python itself prints a traceback."""
COMMANDS = (
    "serve --port 0",
    "generate Hi",
    "chat MODEL",
    "run-batch -i REQUESTS -o OUT",
    "build MODEL --output-dir OUT",
    "quantize MODEL --output-dir OUT --method wint8",
    "convert MODEL --output-dir OUT",
    "bench throughput MODEL --num-prompts 8 --input-len 32 --output-len 128",
    "bench latency MODEL",
    "bench serve --base-url URL",
    "top --url URL --interval 0.1",
    "pd --prefill 1 --decode 1 --port 0",
    "pd status --url URL",
    "download org/name --endpoint SILENT",
    "list",
    "ps",
    "doctor",
    "plan memory MODEL",
)


@pytest.fixture
def values(servers: Servers, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Values of the words in ``COMMANDS``."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500, "min_tokens": 500}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield {
            "MODEL": str(demo.CHAT),
            "OUT": str(tmp_path / "out"),
            "REQUESTS": str(tmp_path / "requests.jsonl"),
            "SILENT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "URL": servers.get("--num-gpu-blocks-override", "400").root,
        }


def arguments_of(command: str, values: dict[str, str]) -> list[str]:
    return [values.get(word, word) for word in command.split()]


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_interrupt_at_any_moment_ends_without_traceback(command: str, values: dict[str, str]) -> None:
    def interrupt(moment: float) -> tuple[int, str]:
        words = arguments_of(command, values | {"OUT": f"{values['OUT']}-{moment:.2f}"})
        with subprocess.Popen(
            [sys.executable, "-c", ENTRY, *words],
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdin and process.stdout
            process.stdout.readline()
            time.sleep(moment)  # the moment matters, not an event
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    with ThreadPoolExecutor(CONCURRENT) as pool:
        for moment, (status, errors) in zip(MOMENTS, pool.map(interrupt, MOMENTS), strict=True):
            assert "Traceback" not in errors and "Exception ignored" not in errors, f"after {moment:.2f} s: {errors}"
            assert status in (0, 130, -signal.SIGINT, 1), f"after {moment:.2f} s: {status} {errors}"


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["chat MODEL", "top --url URL --interval 0.1", "generate Hi"])
def test_ctrl_c_at_any_moment_on_terminal_ends_without_traceback(
    command: str, values: dict[str, str], tmp_path: Path
) -> None:
    for moment in MOMENTS:
        arguments = [sys.executable, "-c", ENTRY, *arguments_of(command, values)]
        with Terminal(*arguments, columns=100, lines=200, folder=tmp_path) as terminal:
            terminal.wait_for(lambda screen: "called" in screen)
            time.sleep(moment)  # the moment matters, not an event
            terminal.type("\x03")
            while terminal.process.poll() is None and "again" not in terminal.received:
                terminal.read(time.monotonic() + 0.1)
            if terminal.process.poll() is None:
                terminal.type("\x04")
            deadline = time.monotonic() + 60
            while terminal.read(deadline):
                pass
            shown = "\n".join(terminal.screen.display)
            assert "Traceback" not in shown and "Exception" not in shown, f"after {moment:.2f} s: {shown}"


def test_interrupt_in_a_destructor_ends_the_command() -> None:
    script = """
import signal, time
from penstock.cli.interrupts import repeat_ignored_interrupts

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

repeat_ignored_interrupts()
try:
    Interrupted()
    time.sleep(50)
except KeyboardInterrupt:
    print("interrupted")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("interrupted\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["<&- >&-", pytest.param("2>&-", marks=pytest.mark.thorough)])
def test_commands_with_closed_standard_streams_end_without_traceback(
    redirection: str, values: dict[str, str], tmp_path: Path
) -> None:
    for number, command in enumerate(COMMANDS):
        if command.startswith(("serve", "pd ", "download")):  # they do not end
            continue
        words = arguments_of(command, values | {"OUT": f"{values['OUT']}-{number}"}) + ["--once"] * command.startswith(
            "top"
        )
        line = f"exec {shlex.join([sys.executable, '-m', 'penstock.cli.main', *words])} {redirection}"
        result = subprocess.run(line, shell=True, stdin=DEVNULL, capture_output=True, text=True, cwd=tmp_path)
        assert result.returncode in (0, 1) and "Traceback" not in result.stderr, f"{command}: {result.stderr}"
