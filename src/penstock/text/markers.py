"""Marks in a text that comes in pieces: what may belong to one is held back until it is known."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple


class Split(NamedTuple):
    """A text at its first mark."""

    before: str
    """Without the space before the mark."""
    gap: str
    """That space."""
    mark: str | None
    """None where no mark is in the text."""
    rest: str
    """What follows the mark; without one, what is to be held back."""


def split(text: str, marks: Sequence[str], last: bool, space: str = string.whitespace) -> Split:
    """Cut a text at its first mark.

    Args:
        marks: none of which has another in it.
        last: whether the text has come to its end, so that nothing is held back.
        space: characters that belong to a mark that follows them.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        before = text[:at].rstrip(space)
        return Split(before, text[len(before) : at], mark, text[at + len(mark) :])
    if last:
        return Split(text, "", None, "")
    begun = max([beginning(text, mark) for mark in marks], default=0)
    before = text[: len(text) - begun].rstrip(space)
    return Split(before, "", None, text[len(before) :])


def beginning(text: str, mark: str) -> int:
    """How long an end of ``text`` begins ``mark`` without being all of it."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
