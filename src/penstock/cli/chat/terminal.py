"""Input and output of a chat, at a terminal or in a pipe."""

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
SPINNER_DELAY = 0.1
"""Seconds between its frames."""
HISTORY = 1000
"""Lines that are kept."""
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
"""Control characters, which are removed from answers."""


class Terminal:
    """Standard input and output."""

    def __init__(self) -> None:
        self.with_person = sys.stdin.isatty() and sys.stdout.isatty()
        self._escapes = has_escapes()
        self._spinner = SPINNER if can_print(SPINNER) else ASCII_SPINNER

    def lines(self) -> Iterator[str]:
        """The user's messages, until the end of input. At a terminal Ctrl-C clears the line, and a second one ends the
        input.

        At a terminal a line that ends with a backslash continues in the next, and triple quotes enclose several lines;
        in a pipe every line that is not blank is a message.
        """
        if not self.with_person:
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
                    self.note("Ctrl-C again leaves")
                    continue
                cleared = False
                if text.strip():
                    yield text
        print()

    def say(self, text: str) -> None:
        """Print text of an answer, unbuffered."""
        print(text.translate(CONTROLS) if self.with_person else text, end="", flush=True)

    def say_dimmed(self, text: str) -> None:
        """Print a part of a text that is not an answer, unbuffered, at a terminal only."""
        if self.with_person and text:
            print(self._dim(text.translate(CONTROLS)), end="", flush=True)

    def tell(self, text: str) -> None:
        """Print a line that is not an answer."""
        print(text.translate(CONTROLS) if self.with_person else text, flush=True)

    def note(self, text: str) -> None:
        """Print a remark, at a terminal only."""
        if self.with_person:
            print(self._dim(text.translate(CONTROLS)), flush=True)

    def ask(self, question: str) -> str | None:
        """A line of the user's; None where the input has ended, or Ctrl-C was pressed."""
        if not self.with_person:
            return sys.stdin.readline().rstrip("\n") or None
        try:
            return input(question)
        except EOFError:
            print()
        except KeyboardInterrupt:
            print()
        return None

    def complain(self, text: str) -> None:
        print(f"penstock chat: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def waiting(self, what: str, delay: float = 0.0) -> Iterator[None]:
        """Show a spinner beside ``what`` after ``delay`` seconds, at a terminal only."""
        if not self.with_person or not self._escapes:
            if not delay:
                self.note(what)
            yield
            return
        done = Event()
        what = what[: max(shutil.get_terminal_size().columns - 3, 1)]  # a line that wraps cannot be erased

        def spin() -> None:
            if done.wait(delay):
                return
            for frame in cycle(self._spinner):
                print(f"\r{self._dim(f'{frame} {what}')}", end="", flush=True)
                if done.wait(SPINNER_DELAY):
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
        """Ctrl-C calls ``stop`` at a terminal; in a pipe it ends the process."""
        if not self.with_person:
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
    """Line editing with what was typed before, here and in earlier conversations."""
    try:
        import readline
    except ImportError:  # a Python without it still reads lines
        yield
        return
    path = user_folder("XDG_STATE_HOME", ".local/state") / "penstock" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):  # a home that cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
