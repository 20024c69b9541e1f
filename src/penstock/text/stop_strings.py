"""Stop strings, found however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .markers import beginning


class Found(NamedTuple):
    text: str
    """To be sent on now."""
    stop: str | None
    """The stop string that ends the text, if one was found."""


class StopStrings:
    """Passes text on and ends it at the first stop string.

    What may be the beginning of one is held back until it is known not to be, so that no part of a stop string
    leaks into a stream.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def add(self, text: str, last: bool = False) -> Found:
        """Take in a piece; with ``last`` nothing is held back any more."""
        text, self._held = self._held + text, ""
        if not self._stops:
            return Found(text, None)
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            # The one complete first, or else the cutting would matter; of several, the first to begin.
            at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            return Found(text[: at + len(stop)] if self._include else text[:at], stop)
        if not last:
            keep = max([beginning(text, stop) for stop in self._stops])
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return Found(text, None)

    def skip(self, text: str) -> str:
        """Pass a piece on without looking for stops in it, as before ``min_tokens``."""
        text, self._held = self._held + text, ""
        return text
