"""Progress of what takes long: a bar at a terminal, lines elsewhere, and nothing of what is quick."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from penstock.config import progress

SCRIPT = """
import logging, sys
from penstock.config import progress

progress.DELAY = progress.INTERVAL = float(sys.argv[1])
logging.basicConfig(level=sys.argv[2], format="log: %(message)s")
for _ in progress.track("loading", range(4), 4, "layer", logging.getLogger("test")):
    pass
print("done", file=sys.stderr)
"""


def said(delay: float, level: str, at_terminal: bool) -> str:
    command = [sys.executable, "-c", SCRIPT, str(delay), level]
    if not at_terminal:
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(command, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while b"done" not in shown:
        shown += os.read(master, 4096)
    assert process.wait(60) == 0
    os.close(master)
    return shown.decode()


def test_lines() -> None:
    lines = said(0, "INFO", False).splitlines()
    assert lines == [*(f"log: loading: {share} % of 4 layers" for share in (25, 50, 75)), "done"]


def test_a_bar() -> None:
    shown = said(0, "INFO", True)
    assert "loading: 100%" in shown and "4/4" in shown and "log: " not in shown


@pytest.mark.parametrize("at_terminal", [False, True])
def test_nothing_of_what_is_quick_or_not_to_be_told(at_terminal: bool) -> None:
    assert said(60, "INFO", at_terminal).strip() == "done"
    assert said(0, "WARNING", at_terminal).strip() == "done"


def test_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    told: list[str] = []
    with progress.Progress("fetching", 3 * 10**9, "B", told.append, done=10**9) as bar:
        bar.update(5 * 10**8)
        bar.update(10**9)  # within ten seconds of the line before
    assert told == ["fetching: 50 % of 3.00 GB"]
