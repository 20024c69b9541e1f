"""Hints for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint "; did you mean …?" with the only known name that starts with ``name``, or else the most similar one. Empty
    if no name is close; one or two characters (``-m``) are similar to nothing."""
    names = list(known)
    longer = [one for one in names if name and one.startswith(name)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(name, names if len(name) > 2 else [], 1)
    return f"; did you mean {near[0]}?" if near else ""
