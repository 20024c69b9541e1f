"""Markers in streamed text: the end of a text that may be the beginning of a marker is held back."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple


class MarkerSplit(NamedTuple):
    """A text, split at its first marker."""

    before: str
    """Without the whitespace before the marker."""
    gap: str
    """The whitespace before the marker, which is not part of ``before``."""
    marker: str | None
    """None where the text has none."""
    rest: str
    """What follows the marker; without one, the end of the text that is to be held back."""


def split_at_marker(text: str, markers: Sequence[str], last: bool, space: str = string.whitespace) -> MarkerSplit:
    """Split a text at its first marker.

    Args:
        markers: none of them contains another.
        last: whether the text is complete, so that nothing is held back.
        space: characters that are removed before a marker.
    """
    matches = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if matches:
        at, marker = min(matches)
        before = text[:at].rstrip(space)
        return MarkerSplit(before, text[len(before) : at], marker, text[at + len(marker) :])
    if last:
        return MarkerSplit(text, "", None, "")
    partial = max([partial_match_length(text, marker) for marker in markers], default=0)
    before = text[: len(text) - partial].rstrip(space)
    return MarkerSplit(before, "", None, text[len(before) :])


def partial_match_length(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper prefix of ``marker``."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
