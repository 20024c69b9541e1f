"""Input and output of a chat, in a terminal or a pipe."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from threading import Event, Thread
from typing import Protocol

from ..screen import can_print, has_escapes

PROMPT = "> "
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
SPINNER, ASCII_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
FRAME_INTERVAL = 0.1
"""Seconds between two frames of the spinner."""
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
"""Control characters, which are removed from answers."""


class Editor(Protocol):
    """Reads messages and answers to questions from the terminal, with line editing."""

    def read(self) -> str:
        """Read a message. Raises ``KeyboardInterrupt`` for Ctrl-C on an empty line, and ``EOFError`` at the end of
        input."""

    def ask(self, question: str) -> str:
        """Read a line after a question. Raises ``KeyboardInterrupt`` and ``EOFError``."""


class PlainEditor:
    """Reads lines in a terminal without escape sequences; the terminal itself has the editing keys."""

    def read(self) -> str:
        return self.ask(PROMPT)

    def ask(self, question: str) -> str:
        try:
            return input(question)
        except (EOFError, KeyboardInterrupt):
            print()
            raise


class Terminal:
    """Standard input and output.

    Args:
        editor: reads the user's lines in a terminal; None: standard input or output is a pipe or a file.
    """

    def __init__(self, editor: Editor | None) -> None:
        self._editor = editor
        self._escapes = has_escapes()
        self._spinner = SPINNER if can_print(SPINNER) else ASCII_SPINNER

    @property
    def is_interactive(self) -> bool:
        """True if a person types the messages in a terminal."""
        return self._editor is not None

    def lines(self) -> Iterator[str]:
        """Yield the user's messages until the end of input.

        In a terminal, Ctrl-C cancels the line, and pressed twice on an empty line ends the input. In a pipe, each
        non-blank line is a message.
        """
        if self._editor is None:
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
            return
        cleared = False
        with suppress(EOFError):
            while True:
                try:
                    text = self._editor.read()
                except KeyboardInterrupt:
                    if cleared:
                        break
                    cleared = True
                    self.note("press Ctrl-C again to exit")
                    continue
                cleared = False
                if text.strip():
                    yield text

    def write(self, text: str) -> None:
        """Write text of an answer, unbuffered."""
        print(text.translate(CONTROLS) if self.is_interactive else text, end="", flush=True)

    def write_dimmed(self, text: str) -> None:
        """Write text that is not part of an answer, unbuffered; only in a terminal."""
        if self.is_interactive and text:
            print(self._dim(text.translate(CONTROLS)), end="", flush=True)

    def print_line(self, text: str) -> None:
        """Print a line that is not part of an answer."""
        print(text.translate(CONTROLS) if self.is_interactive else text, flush=True)

    def note(self, text: str) -> None:
        """Print a dimmed line; only in a terminal."""
        if self.is_interactive:
            print(self._dim(text.translate(CONTROLS)), flush=True)

    def ask(self, question: str) -> str | None:
        """Read a line from the user; None at the end of input, or if Ctrl-C is pressed."""
        if self._editor is None:
            return sys.stdin.readline().rstrip("\n") or None
        try:
            return self._editor.ask(question)
        except (EOFError, KeyboardInterrupt):
            return None

    def print_error(self, text: str) -> None:
        print(f"penstock chat: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def waiting(self, label: str, delay: float = 0.0) -> Iterator[None]:
        """Show a spinner with a label after ``delay`` seconds; only in a terminal."""
        if not self.is_interactive or not self._escapes:
            if not delay:
                self.note(label)
            yield
            return
        done = Event()
        label = label[: max(shutil.get_terminal_size().columns - 3, 1)]  # a wrapped line could not be erased

        def spin() -> None:
            if done.wait(delay):
                return
            for frame in cycle(self._spinner):
                print(f"\r{self._dim(f'{frame} {label}')}", end="", flush=True)
                if done.wait(FRAME_INTERVAL):
                    break
            print("\r\x1b[K", end="", flush=True)

        spinner = Thread(target=spin, daemon=True)
        spinner.start()
        try:
            yield
        finally:
            done.set()
            spinner.join()

    @contextmanager
    def interruptible(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call ``stop`` on Ctrl-C in a terminal; in a pipe, Ctrl-C ends the process."""
        if not self.is_interactive:
            yield
            return
        before = signal.signal(signal.SIGINT, lambda number, frame: stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{NORMAL}" if self._escapes and not os.environ.get("NO_COLOR") else text
