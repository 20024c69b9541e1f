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
from collections.abc import Callable
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

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
    """A terminal of the given size that runs a command."""

    def __init__(self, *command: str, columns: int, lines: int, folder: Path) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._terminal, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self._process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(folder), "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(child)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, condition: Callable[[str], bool]) -> str:
        """Wait until ``condition`` holds for the text of the screen; return that text."""
        deadline = time.monotonic() + 60
        while not condition(text := "\n".join(self.screen.display)):
            assert select.select([self._terminal], [], [], deadline - time.monotonic())[0], text
            self._stream.feed(os.read(self._terminal, 1 << 16))
        return text

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
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
