"""Run a command in a terminal, and render its screen as SVG for the documentation."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Self

import pyte

LIMIT = 60.0
"""Maximum seconds of waiting."""

WIDTH, HEIGHT = 8.4, 18
"""Size of a character in pixels."""
MARGIN = 14
FOREGROUND, BACKGROUND = "#d4d4d4", "#1e1e1e"
COLOURS = {
    "black": "#5c5c5c",
    "red": "#f48771",
    "green": "#89d185",
    "brown": "#e5c07b",
    "blue": "#6cb6ff",
    "magenta": "#d19cf0",
    "cyan": "#4ec9b0",
    "white": "#ffffff",
}


class Terminal:
    """A terminal of the given size that runs a command, which keeps its state in ``folder``."""

    def __init__(
        self, *command: str, columns: int, lines: int, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.received = ""
        """Output since the last ``type``, with escape sequences."""
        self._stream = pyte.Stream(self.screen)
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._terminal, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        settings = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(folder)}
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            env={**inherited, **settings, **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # lets Ctrl-C reach the command
        )
        os.close(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def type(self, text: str) -> None:
        self.received = ""
        os.write(self._terminal, text.encode())

    def read(self, deadline: float) -> bool:
        """Show the next output of the command; returns False if it has none before the deadline."""
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
        try:
            text = self._decode(os.read(self._terminal, 1 << 16)) if ready else ""
        except OSError:  # the command has closed its side of the terminal
            return False
        self.received += text
        self._stream.feed(text)
        return bool(ready)

    def wait_for(self, condition: Callable[[str], bool]) -> str:
        """Wait until ``condition`` holds for the text of the screen; return that text."""
        deadline = time.monotonic() + LIMIT
        while not condition(text := "\n".join(self.screen.display)):
            assert self.read(deadline), text
        return text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def render_svg(screen: pyte.Screen) -> str:
    """The text of a screen as SVG, with colours and bold letters, without trailing empty lines."""
    rows = len("\n".join(screen.display).rstrip().splitlines())
    width, height = screen.columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        '<g font-family="Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="14">',
    ]
    for row in range(rows):
        column, cells = 0, [screen.buffer[row][i] for i in range(screen.columns)]
        for style, run in groupby(cells, lambda cell: (cell.fg, cell.bold, cell.reverse)):
            text = "".join(cell.data for cell in run)
            if text.strip():
                parts.append(_run(text.rstrip(), row, column, *style))
            column += len(text)
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _run(text: str, row: int, column: int, colour: str, bold: bool, reverse: bool) -> str:
    fill = COLOURS.get(colour) or (FOREGROUND if colour == "default" else f"#{colour}")
    x, y = MARGIN + column * WIDTH, MARGIN + (row + 0.75) * HEIGHT
    weight = ' font-weight="bold"' if bold else ""
    background = ""
    if reverse:
        position = f'x="{x:.1f}" y="{y - 0.75 * HEIGHT:.1f}" width="{len(text) * WIDTH:.1f}" height="{HEIGHT}"'
        background, fill = f'<rect {position} fill="{fill}"/>', BACKGROUND
    position = f'x="{x:.1f}" y="{y:.1f}" textLength="{len(text) * WIDTH:.1f}"'
    return f'{background}<text {position} fill="{fill}"{weight} xml:space="preserve">{escape(text)}</text>'
