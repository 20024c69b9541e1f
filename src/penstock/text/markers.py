"""Search for markers in streamed text. A suffix that may be the beginning of a marker is held back."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple


class MarkerSplit(NamedTuple):
    """A text split at its first marker."""

    before: str
    """Text before the marker, without trailing whitespace."""
    gap: str
    """Whitespace between ``before`` and the marker."""
    marker: str | None
    rest: str
    """Text after the marker; without a marker, the suffix to hold back."""


def split_at_marker(text: str, markers: Sequence[str], last: bool, space: str = string.whitespace) -> MarkerSplit:
    """Split a text at its first marker.

    Args:
        markers: texts to find. Of two markers at the same position the longer one is found; otherwise no marker may
            contain another marker.
        last: the text is complete, so nothing is held back.
        space: characters removed before a marker.
    """
    matches = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if matches:
        at, marker = min(matches, key=lambda match: (match[0], -len(match[1])))
        before = text[:at].rstrip(space)
        if not last and any(len(longer) > len(text) - at and longer.startswith(text[at:]) for longer in markers):
            return MarkerSplit(before, "", None, text[len(before) :])
        return MarkerSplit(before, text[len(before) : at], marker, text[at + len(marker) :])
    if last:
        return MarkerSplit(text, "", None, "")
    partial = max([partial_match_length(text, marker) for marker in markers], default=0)
    before = text[: len(text) - partial].rstrip(space)
    return MarkerSplit(before, "", None, text[len(before) :])


def partial_match_length(text: str, marker: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``marker``."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
