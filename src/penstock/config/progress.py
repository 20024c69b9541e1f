"""Progress of long operations: a bar if standard error is a terminal, otherwise log lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

T = TypeVar("T")

DELAY = 2.0
"""Seconds after which the progress is shown."""
INTERVAL = 10.0
"""Seconds between two log lines."""


class Progress:
    """Shows the progress of an operation that takes longer than ``DELAY``. Not thread-safe.

    Args:
        label: name of the operation.
        total: number of units to process.
        unit: name of a unit; bytes (``B``) are shown with prefixes.
        print_line: prints a line, used if standard error is not a terminal.
        done: number of units processed before the start.
        shown: show the progress; if False, nothing is shown.
    """

    def __init__(
        self, label: str, total: int, unit: str, print_line: Callable[[str], None], done: int = 0, shown: bool = True
    ) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._print_line = print_line if shown else None
        self.done = done
        self._next = time.monotonic() + DELAY
        self._bar = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=label,
                unit=unit,
                unit_scale=unit == "B",
                delay=DELAY,
                dynamic_ncols=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1, label: str | None = None, total: int | None = None) -> None:
        """Add ``count`` processed units, and replace label and total if given."""
        self.done += count
        self._label = label or self._label
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.total = self._total
            if label:
                self._bar.set_description(label, refresh=False)
            self._bar.update(count)
        elif self._print_line and time.monotonic() >= self._next and self.done < self._total:
            self._next = time.monotonic() + INTERVAL
            share = 100 * self.done // max(self._total, 1)
            self._print_line(f"{self._label}: {share} % of {self._amount()}")

    def set(self, done: int, total: int) -> None:
        """Replace the numbers of processed units and of all units."""
        self.update(done - self.done, total=max(total, done))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _amount(self) -> str:
        if self._unit == "B":
            return f"{self._total / 1e9:.2f} GB"
        return f"{self._total:,} {self._unit}s"


def track(label: str, items: Iterable[T], total: int, unit: str, logger: logging.Logger) -> Iterator[T]:
    """Iterate over items and show the progress, unless INFO is disabled for the logger."""
    with Progress(label, total, unit, logger.info, shown=logger.isEnabledFor(logging.INFO)) as progress:
        for item in items:
            yield item
            progress.update()


def log_or_print(logger: logging.Logger) -> Callable[[str], None]:
    """Return a function that prints a line: to the log, or to standard error if INFO is disabled (in commands)."""
    return logger.info if logger.isEnabledFor(logging.INFO) else lambda line: print(line, file=sys.stderr, flush=True)


def print_line(command: str) -> Callable[[str], None]:
    """Return a function that prints a line on standard error, after ``penstock`` and the command's name."""
    return lambda line: print(f"penstock {command}: {line}", file=sys.stderr, flush=True)
