"""Where a JSON object ends in a text that comes in pieces, and that need not be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Scanned(NamedTuple):
    length: int
    """Characters that belong to the object; the next piece begins after them."""
    ended: bool


class BraceScanner:
    """Counts braces outside of strings.

    Args:
        stops: marks that end an object outside of its strings, whatever braces are open: its writer forgot them.
        depth: braces that are open at the beginning.
    """

    def __init__(self, stops: Sequence[str], depth: int = 0) -> None:
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
        self._depth = depth
        self._string = self._escaped = False

    def scan(self, text: str, last: bool) -> Scanned:
        """Go on with a piece; the ``last`` one may end with the beginning of a mark."""
        for at, char in enumerate(text):
            if self._string:
                self._string = char != '"' or self._escaped
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._string = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if not self._depth:
                    return Scanned(at + 1, True)
            elif char in self._firsts:
                if any(text.startswith(stop, at) for stop in self._stops):
                    return Scanned(at, True)
                if not last and any(stop.startswith(text[at:]) for stop in self._stops):
                    return Scanned(at, False)
        return Scanned(len(text), False)
