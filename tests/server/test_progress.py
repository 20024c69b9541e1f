"""Progress of long operations: a bar on a terminal, log lines elsewhere, and nothing for quick operations."""

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


def run_script(delay: float, level: str, on_terminal: bool) -> str:
    command = [sys.executable, "-c", SCRIPT, str(delay), level]
    if not on_terminal:
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    return run_on_terminal(command)


def run_on_terminal(command: list[str]) -> str:
    """Run a command on a pseudo-terminal; return its output up to the line "done"."""
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


def test_progress_without_terminal_is_log_lines() -> None:
    lines = run_script(0, "INFO", False).splitlines()
    assert lines == [*(f"log: loading: {share} % of 4 layers" for share in (25, 50, 75)), "done"]


def test_progress_on_terminal_is_bar() -> None:
    shown = run_script(0, "INFO", True)
    assert "loading: 100%" in shown and "4/4" in shown and "log: " not in shown


@pytest.mark.parametrize("on_terminal", [False, True])
def test_quick_or_unlogged_operation_shows_no_progress(on_terminal: bool) -> None:
    assert run_script(60, "INFO", on_terminal).strip() == "done"
    assert run_script(0, "WARNING", on_terminal).strip() == "done"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("build MODEL --output-dir OUT", "packed: 100%"),
        ("quantize MODEL --output-dir OUT --method wint4", "written: 100%"),
    ],
)
def test_build_and_quantize_show_progress(arguments: str, text: str, tmp_path: Path) -> None:
    paths = {"MODEL": str(demo.CHAT), "OUT": str(tmp_path / "out")}
    assert text in run_on_terminal(
        [sys.executable, "-c", COMMAND, *(paths.get(part, part) for part in arguments.split())]
    )


def test_loading_of_transformers_model_shows_progress() -> None:
    code = "import logging, sys; from penstock import LLM; from penstock.config import progress\n"
    code += "progress.DELAY = 0.0; logging.basicConfig(level='INFO')\n"
    code += "LLM(model_impl='transformers', num_gpu_blocks_override=100); print('done', file=sys.stderr)"
    assert "loading weights: 100%" in run_on_terminal([sys.executable, "-c", code])


def test_progress_of_bytes_has_units_and_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    lines: list[str] = []
    with progress.Progress("fetching", 3 * 10**9, "B", lines.append, done=10**9) as bar:
        bar.update(5 * 10**8)
        bar.update(10**9)  # ignored: less than 10 s after the previous line
    assert lines == ["fetching: 50 % of 3.00 GB"]
