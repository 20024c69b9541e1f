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

from penstock.config.user_folders import user_folder

from ..screen import can_print, has_escapes

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
SPINNER, ASCII_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
FRAME_INTERVAL = 0.1
"""Seconds between two frames of the spinner."""
HISTORY = 1000
"""Maximum number of lines in the history file."""
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
"""Control characters, which are removed from answers."""


class Terminal:
    """Standard input and output."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._escapes = has_escapes()
        self._spinner = SPINNER if can_print(SPINNER) else ASCII_SPINNER

    def lines(self) -> Iterator[str]:
        """Yield the user's messages until the end of input.

        In a terminal, a line that ends with a backslash continues on the next line, and triple quotes enclose several
        lines. Ctrl-C clears the line, and a second Ctrl-C ends the input. In a pipe, each non-blank line is a message.
        """
        if not self.is_interactive:
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
            return
        cleared = False
        with _history(), suppress(EOFError):
            while True:
                try:
                    text = self._read()
                except KeyboardInterrupt:
                    if cleared:
                        break
                    cleared = True
                    print()
                    self.note("press Ctrl-C again to exit")
                    continue
                cleared = False
                if text.strip():
                    yield text
        print()

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
        if not self.is_interactive:
            return sys.stdin.readline().rstrip("\n") or None
        try:
            return input(question)
        except EOFError:
            print()
        except KeyboardInterrupt:
            print()
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

    def _read(self) -> str:
        line = input(PROMPT)
        if line.startswith(QUOTES):
            text = line.removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + input(MORE)
            return text.rstrip().removesuffix(QUOTES)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(MORE)
        return line


@contextmanager
def _history() -> Iterator[None]:
    """Enable line editing with a history, which is saved in a file."""
    try:
        import readline
    except ImportError:  # without readline, input() has no line editing
        yield
        return
    path = user_folder("XDG_STATE_HOME", ".local/state") / "penstock" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):  # the home folder may be read-only
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
