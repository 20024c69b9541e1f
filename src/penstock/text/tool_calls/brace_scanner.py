"""Search for the end of a JSON object in streamed, possibly malformed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ScanResult(NamedTuple):
    length: int
    """Number of characters consumed. The caller passes the text after them to the next call."""
    ended: bool


class BraceScanner:
    """Finds the end of a JSON object by counting braces outside strings.

    Args:
        stops: texts that end the object outside strings even if braces are still open.
        depth: initial number of open braces.
    """

    def __init__(self, stops: Sequence[str], depth: int = 0) -> None:
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
        self._depth = depth
        self._string = self._escaped = False

    def scan(self, text: str) -> ScanResult:
        """Scan a chunk up to the end of the object, a stop, or a suffix that may be the beginning of a stop."""
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
                    return ScanResult(at + 1, True)
            elif char in self._firsts:
                if any(text.startswith(stop, at) for stop in self._stops):
                    return ScanResult(at, True)
                if any(stop.startswith(text[at:]) for stop in self._stops):
                    return ScanResult(at, False)
        return ScanResult(len(text), False)
