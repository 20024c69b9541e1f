"""``penstock ps`` and ``penstock stop``, and commands that use the only running server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CommandResult, Served, processes, run_in_process

from penstock.cli.main import main
from penstock.cli.processes import ProcessHandle
from penstock.cli.ps import duration
from penstock.cli.running_servers import only_url
from penstock.serve.process.server_record import RecordFile, ServerRecord, running_servers

BLOCKS = ("--num-gpu-blocks-override", "100")
DEAD = """
import os
from penstock.serve.process.server_record import RecordFile
record = RecordFile(models={"m": "ready"})
os._exit(0)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary folder of the commands and servers of a test, which find no other servers."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def penstock(*arguments: str) -> CommandResult:
    return run_in_process(main, *arguments)


def listed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(penstock("ps", "--json").stdout)
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_commands_without_running_server(folder: Path) -> None:
    assert penstock("ps") == (0, "no running servers; penstock serve starts one\n", "")
    assert listed() == []
    assert penstock("stop") == (1, "", "no server is running\n")
    assert penstock("stop", "--all").returncode == 0
    refused = penstock("stop", "qwen")
    assert refused.returncode == 2 and "process id qwen: no server is running" in refused.stderr
    asked = penstock("top", "--once")  # another program may listen at this port
    assert "http://127.0.0.1:8000" in asked.stderr + asked.stdout
    assert "url: is required with --model-name" in penstock("chat", "--model-name", "some").stderr


def test_record_lists_server_until_it_is_closed() -> None:
    with RecordFile(models={"org/qwen": "ready", "small": "unloaded"}, state="ready", device="cpu") as record:
        header, row = penstock("ps").stdout.splitlines()
        assert header.split() == ["MODEL", "ADDRESS", "PID", "STATE", "UPTIME", "DEVICE", "MEMORY"]
        assert row.startswith(f"org/qwen, small (unloaded)  -        {os.getpid()}  ready  ") and row.endswith(" GiB")
        record.update(url="http://127.0.0.1:8123", state="draining")
        (server,) = listed()
        assert server["url"] == "http://127.0.0.1:8123" and server["state"] == "draining"
        assert server["uptime"] > 0 and server["memory"] > 10**7
    assert listed() == []


def test_refresh_keeps_record_from_removal_as_an_old_file(folder: Path) -> None:
    with RecordFile(models={"m": "ready"}) as record:
        paths = [*folder.rglob("*")]
        assert len(paths) == 3
        for path in paths:
            os.utime(path, (0, 0))
        record.refresh()
        assert all(path.stat().st_mtime and path.stat().st_atime for path in paths)


@pytest.mark.parametrize("removed", ["server.json", ".*", "*"])
def test_refresh_writes_removed_record_again(folder: Path, removed: str) -> None:
    with RecordFile(models={"m": "ready"}) as record:
        for path in folder.glob(f"*/{removed}"):
            path.unlink()
        if removed == "*":
            shutil.rmtree(next(folder.glob("*")))
        record.refresh()
        assert listed()[0]["models"] == {"m": "ready"}
    assert not [*folder.glob("*")]


def test_records_of_ended_processes_are_removed(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", DEAD], check=True)
    (left,) = folder.iterdir()
    assert (left / "server.json").exists()
    assert listed() == [] and not left.exists()


def test_control_characters_of_a_name_do_not_break_the_table() -> None:
    with RecordFile(models={"a\tb\x1b[2J": "ready"}), RecordFile(models={"other": "ready"}):
        rows = penstock("ps").stdout.splitlines()
    assert (
        "a b [2J" in "".join(rows) and len({row.index(" MEMORY" if row is rows[0] else " - ") for row in rows[1:]}) == 1
    )


@pytest.mark.parametrize("fields", [{"state": "starting"}, {"state": "ready", "role": "decode"}])
def test_chat_does_not_use_a_server_that_does_not_answer_clients(fields: dict[str, str]) -> None:
    with RecordFile(url="http://127.0.0.1:9", **fields):
        assert only_url() == "http://127.0.0.1:9" and only_url(answering=True) == ""


def test_record_of_reused_process_id_lists_no_server() -> None:
    with RecordFile() as record:
        record.update(start_time="1")
        assert running_servers() == []


def test_damaged_record_lists_no_server(folder: Path) -> None:
    with RecordFile():
        (path,) = folder.glob("*/server.json")
        path.write_text('{"pid": "many"}')
        assert running_servers() == []


def test_server_without_writable_temporary_folder_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with RecordFile() as record:
        record.update(state="ready")
    assert running_servers() == []


def test_stop_refuses_ambiguous_and_unknown_arguments() -> None:
    own = {"url": "http://127.0.0.1:8123", "grpc_address": "127.0.0.1:8124"}
    with RecordFile(models={"a/m": "ready"}, **own), RecordFile(models={"b/m": "ready", "c": "ready"}):
        several = penstock("stop")
        assert several.returncode == 2 and "several servers are running: give the process id of one" in several.stderr
        for server in ("a/m at http://127.0.0.1:8123", "b/m, c"):
            assert f"{server} (process {os.getpid()})" in several.stderr
        assert "m means several servers" in penstock("stop", "m").stderr
        unknown = penstock("stop", "d").stderr
        assert "process id d: running are: " in unknown and "a/m at http://127.0.0.1:8123" in unknown
        assert "--all: cannot be combined with m" in penstock("stop", "m", "--all").stderr
        assert "--timeout: must be at least 0 seconds, is -1" in penstock("stop", "c", "--timeout", "-1").stderr


def test_wait_for_a_process_accepts_infinity() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process, ProcessHandle(process.pid) as handle:
        assert process.stdin
        process.stdin.close()
        assert handle.wait(float("inf"))


def test_stop_does_not_signal_a_later_process_with_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may end between the listing and the signal."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ended = ServerRecord(pid=other.pid, start_time="1", models={"m": "ready"})
        monkeypatch.setattr("penstock.cli.stop.listed_servers", lambda: [ended])
        assert penstock("stop", "m") == (0, "", "")
        assert other.poll() is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.9, "7s"), (65, "1m 5s"), (3600, "1h 0m"), (100_000, "1d 3h"), (1e7, "115d 17h")]
)
def test_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(*BLOCKS, "--server-dev-mode", "--served-model-name", "org/demo") as served:
        yield served


class Stream:
    """A completion's stream, read by a thread. The constructor returns after the first token."""

    def __init__(self, served: Served, tokens: int) -> None:
        self.lines: list[str] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(f"{served.url}/completions", tokens))
        self._thread.start()
        self._started.wait()

    def _read(self, url: str, tokens: int) -> None:
        body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with suppress(httpx.HTTPError), httpx.stream("POST", url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                self.lines.append(line)
                self._started.set()

    def is_complete(self) -> bool:
        """Wait for the end of the stream."""
        self._thread.join()
        return "data: [DONE]" in self.lines


@pytest.mark.slow
def test_states_of_a_server_from_start_to_end(folder: Path) -> None:
    seen = []
    server = Served(*BLOCKS, "--server-dev-mode")
    try:
        until(listed)
        seen.append(listed()[0]["state"])
        server.__enter__()
        seen.append(listed()[0]["state"])
        httpx.post(f"{server.root}/sleep", timeout=60).raise_for_status()
        until(lambda: listed()[0]["state"] == "sleeping")
        httpx.post(f"{server.root}/wake_up", timeout=60).raise_for_status()
        until(lambda: listed()[0]["state"] == "ready")
        (found,) = listed()
        assert found["pid"] == server.pid and found["url"] == server.root and found["device"] == "cpu"
        assert found["models"] == {"penstock-demo": "ready"} and found["memory"] > 10**8
        os.kill(server.pids["engine"][0], 9)
        until(lambda: listed()[0]["state"] == "starting")
        until(lambda: listed()[0]["state"] == "ready")
        stream = Stream(server, 300)
        stopping = threading.Thread(target=lambda: seen.append(penstock_process("stop", "penstock-demo")))
        stopping.start()
        until(lambda: listed()[0]["state"] == "draining")
        stopping.join()
        assert stream.is_complete(), "open requests finish"
        assert server.ended() == 0 and listed() == []
    finally:
        server.kill()
    assert seen == ["starting", "ready", 0]


def penstock_process(*arguments: str) -> int:
    """Exit status of a command in a separate process: output of a thread in this process would be mixed up."""
    return subprocess.run([sys.executable, "-m", "penstock.cli.main", *arguments], capture_output=True).returncode


@pytest.mark.slow
def test_stop_with_timeout_names_force_which_kills(served: Served) -> None:
    stream = Stream(served, 1900)
    late = penstock("stop", "demo", "--timeout", "0")
    assert late.returncode == 1
    assert f"process {served.pid} still runs after 0 seconds" in late.stderr
    assert f"penstock stop {served.pid} --force" in late.stderr
    killed = penstock("stop", str(served.pid), "--force")
    assert killed.returncode == 0 and "stopped org/demo" in killed.stdout
    assert not stream.is_complete()
    until(lambda: not processes(served.pid))
    assert listed() == []


@pytest.mark.slow
def test_commands_use_the_only_server_and_stop_selects_one_of_several(served: Served) -> None:
    assert f"penstock top   {served.root}" in penstock("top", "--once", "--interval", "0.1").stdout
    chat = [sys.executable, "-m", "penstock.cli.main", "chat", "--temperature", "0"]
    answer = subprocess.run(chat, input="What is the capital of Canada?\n", capture_output=True, text=True)
    assert answer.returncode == 0 and "Ottawa" in answer.stdout
    with Served(*BLOCKS, "--served-model-name", "second", "--grpc-port", "0") as second:
        assert [server["models"] for server in listed()] == [{"org/demo": "ready"}, {"second": "ready"}]
        assert penstock("stop").returncode == 2
        port = served.root.rpartition(":")[2]
        assert penstock("stop", port).returncode == 0
        assert served.ended() == 0
        (left,) = listed()
        assert left["url"] == second.root and left["pid"] == second.pid
        assert penstock("stop", left["grpc_address"]).returncode == 0
        assert second.ended() == 0
