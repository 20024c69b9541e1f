"""Progress of what takes long: a bar at a terminal, lines elsewhere, and nothing of what is quick."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from penstock import demo
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


COMMAND = """
import sys
from penstock.cli.main import main
from penstock.config import progress

progress.DELAY = 0.0
status = main(sys.argv[1:])
print("done", file=sys.stderr)
sys.exit(status)
"""


def said(delay: float, level: str, at_terminal: bool) -> str:
    command = [sys.executable, "-c", SCRIPT, str(delay), level]
    if not at_terminal:
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    return at_a_terminal(command)


def at_a_terminal(command: list[str]) -> str:
    """What a command shows there, up to the line "done"."""
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("build MODEL --output-dir OUT", "packed: 100%"),
        ("quantize MODEL --output-dir OUT --method wint4", "written: 100%"),
    ],
)
def test_commands_show_theirs(arguments: str, words: str, tmp_path: Path) -> None:
    places = {"MODEL": str(demo.CHAT), "OUT": str(tmp_path / "out")}
    assert words in at_a_terminal([sys.executable, "-c", COMMAND, *(places.get(w, w) for w in arguments.split())])


def test_a_model_of_transformers_shows_its_loading() -> None:
    code = "import logging, sys; from penstock import LLM; from penstock.config import progress\n"
    code += "progress.DELAY = 0.0; logging.basicConfig(level='INFO')\n"
    code += "LLM(model_impl='transformers', num_gpu_blocks_override=100); print('done', file=sys.stderr)"
    assert "loading weights: 100%" in at_a_terminal([sys.executable, "-c", code])


def test_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    told: list[str] = []
    with progress.Progress("fetching", 3 * 10**9, "B", told.append, done=10**9) as bar:
        bar.update(5 * 10**8)
        bar.update(10**9)  # within ten seconds of the line before
    assert told == ["fetching: 50 % of 3.00 GB"]
