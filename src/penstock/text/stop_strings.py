"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .markers import partial_match_length


class StopResult(NamedTuple):
    text: str
    """Text that can be streamed now."""
    stop: str | None
    """The stop string that was found, or None."""


class StopStrings:
    """Ends a text at the first stop string.

    A suffix that may be the beginning of a stop string is held back, so that no part of a stop string is streamed.

    Args:
        include: keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held_back = ""

    def add(self, text: str, last: bool = False) -> StopResult:
        """Process a chunk. With ``last`` nothing is held back."""
        text, self._held_back = self._held_back + text, ""
        if not self._stops:
            return StopResult(text, None)
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            # Choose the match that ends first: the result must not depend on the chunks. A tie goes to the longest.
            at, stop = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            return StopResult(text[: at + len(stop)] if self._include else text[:at], stop)
        if not last:
            keep = max([partial_match_length(text, stop) for stop in self._stops])
            text, self._held_back = text[: len(text) - keep], text[len(text) - keep :]
        return StopResult(text, None)

    def skip(self, text: str) -> str:
        """Return a chunk without checking for stop strings (used before ``min_tokens`` is reached)."""
        text, self._held_back = self._held_back + text, ""
        return text
