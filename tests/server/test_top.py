"""``penstock top``: a live view of a server in the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading

import httpx
import pytest
from serving import Served, Servers, free_ports, run_in_process

from penstock.cli.main import main

COMMAND = [sys.executable, "-m", "penstock.cli.main", "top"]


def test_once_prints_running_requests(servers: Servers) -> None:
    server = servers.get("--num-gpu-blocks-override", "400")
    ended = threading.Event()

    def generate() -> None:
        body = {"prompt": "Once", "max_tokens": 1500, "min_tokens": 1500, "stream": True}
        while not ended.is_set():
            with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=60) as answer:
                for _ in answer.iter_lines():
                    if ended.is_set():
                        break

    threads = [threading.Thread(target=generate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):  # retry until both requests run and the engine has recorded steps
            result = run_in_process(main, "top", "--url", server.root, "--once", "--interval", "0.2")
            if all(text in result.stdout for text in ("running 2", "last steps", "between tokens")):
                break
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert result.returncode == 0
    assert "of 400 blocks" in result.stdout and "REQUEST" in result.stdout and "between tokens" in result.stdout
    assert result.stdout.count(" running ") == 2  # one table row per request


@pytest.mark.parametrize("key", ["q", "Ctrl-C"])
def test_terminal_view_fits_and_restores_settings(servers: Servers, key: str) -> None:
    server = servers.get("--num-gpu-blocks-override", "400")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 44, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "ascii"}
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    command = [*COMMAND, "--url", server.url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    settings = termios.tcgetattr(slave)
    shown = b""
    while shown.count(b"penstock top   ") < 3:
        shown += os.read(master, 4096)
    entered, *screens = shown.decode("ascii").split("\033[H")
    assert entered.startswith("\033[?1049h"), "the alternate screen must be entered first"
    lines = [line.split("\033[")[0] for line in screens[1].splitlines()]
    assert all(len(line) <= 44 for line in lines)
    screen = " ".join(lines)
    for part in ("running ", "preemptions", "of 400 blocks", "prefix hits", "drafts accepted", "...."):
        assert part in screen, "texts that do not fit must wrap to a separate line"
    if key == "q":
        os.write(master, b"q")
    else:
        process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert termios.tcgetattr(slave) == settings, "terminal settings must be restored"
    os.close(slave)
    while b"\033[?1049l" not in shown:
        shown += os.read(master, 4096)
    os.close(master)


def test_dumb_terminal_gets_no_escapes(servers: Servers) -> None:
    server = servers.get("--num-gpu-blocks-override", "400")
    master, slave = pty.openpty()
    command = [*COMMAND, "--url", server.url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "dumb"})
    os.close(slave)
    shown = b""
    while shown.count(b"penstock top   ") < 2:
        shown += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert b"\033" not in shown and b"Traceback" not in shown
    os.close(master)


def test_unreachable_server_or_missing_key_is_reported() -> None:
    (port,) = free_ports(1)
    result = run_in_process(main, "top", "--url", f"http://127.0.0.1:{port}", "--once")
    assert result.returncode == 1 and "does not respond" in result.stderr
    with Served("--api-key", "secret") as server:
        result = run_in_process(main, "top", "--url", server.root, "--once")
        assert result.returncode == 1 and "set --api-key" in result.stderr
        assert run_in_process(main, "top", "--url", server.root, "--once", "--api-key", "secret").returncode == 0
    assert "interval" in run_in_process(main, "top", "--interval", "0").stderr
