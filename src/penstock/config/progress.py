"""Progress of what may take long: a bar where standard error is a terminal, and lines of the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

T = TypeVar("T")

DELAY = 2.0
"""Seconds of which nothing is shown."""
INTERVAL = 10.0
"""Seconds between two lines."""


class Progress:
    """Shows how much is done of what takes longer than two seconds. Not safe for threads.

    Args:
        words: what is done.
        total: how much there is.
        unit: of what is counted; bytes (``B``) are shown with prefixes.
        tell: prints a line, where standard error is no terminal.
        done: how much was done before.
        shown: False shows nothing.
    """

    def __init__(
        self, words: str, total: int, unit: str, tell: Callable[[str], None], done: int = 0, shown: bool = True
    ) -> None:
        self._words = words
        self._total = total
        self._unit = unit
        self._tell = tell if shown else None
        self.done = done
        self._next = time.monotonic() + DELAY
        self._bar = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=words,
                unit=unit,
                unit_scale=unit == "B",
                delay=DELAY,
                dynamic_ncols=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1, words: str | None = None, total: int | None = None) -> None:
        """Add to what is done; ``words`` and ``total`` replace those from before."""
        self.done += count
        self._words = words or self._words
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.total = self._total
            if words:
                self._bar.set_description(words, refresh=False)
            self._bar.update(count)
        elif self._tell and time.monotonic() >= self._next and self.done < self._total:
            self._next = time.monotonic() + INTERVAL
            share = 100 * self.done // max(self._total, 1)
            self._tell(f"{self._words}: {share} % of {self._amount()}")

    def set(self, done: int, total: int) -> None:
        """Replace what is done, and how much there is."""
        self.update(done - self.done, total=max(total, done))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _amount(self) -> str:
        if self._unit == "B":
            return f"{self._total / 1e9:.2f} GB"
        return f"{self._total:,} {self._unit}s"


def track(words: str, items: Iterable[T], total: int, unit: str, logger: logging.Logger) -> Iterator[T]:
    """The items, with their progress; nothing is shown where the logger tells no information."""
    with Progress(words, total, unit, logger.info, shown=logger.isEnabledFor(logging.INFO)) as progress:
        for item in items:
            yield item
            progress.update()


def log_or_print(logger: logging.Logger) -> Callable[[str], None]:
    """Writes a line to the log, or to standard error where this process has none, as in commands."""
    return logger.info if logger.isEnabledFor(logging.INFO) else lambda line: print(line, file=sys.stderr, flush=True)


def print_line(command: str) -> Callable[[str], None]:
    """Prints a command's line on standard error."""
    return lambda line: print(f"penstock {command}: {line}", file=sys.stderr, flush=True)
