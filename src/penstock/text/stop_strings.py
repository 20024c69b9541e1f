"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .markers import partial_match_length


class Found(NamedTuple):
    text: str
    """Text to pass on."""
    stop: str | None
    """The stop string that was found."""


class StopStrings:
    """Ends a text at the first stop string.

    The end of the text that may be the beginning of a stop string is held back, so that no part of one is streamed.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def add(self, text: str, last: bool = False) -> Found:
        """Process a piece. With ``last`` nothing is held back any more."""
        text, self._held = self._held + text, ""
        if not self._stops:
            return Found(text, None)
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            # The one that ends first, so that the result does not depend on the pieces; of several, the longest.
            at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            return Found(text[: at + len(stop)] if self._include else text[:at], stop)
        if not last:
            keep = max([partial_match_length(text, stop) for stop in self._stops])
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return Found(text, None)

    def skip(self, text: str) -> str:
        """Pass a piece on without looking for stop strings, as before ``min_tokens``."""
        text, self._held = self._held + text, ""
        return text
