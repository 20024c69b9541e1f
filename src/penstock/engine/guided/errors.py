"""Errors of grammars, and limits that both backends share."""

from __future__ import annotations

MAX_WHITESPACE = 32
"""Characters of whitespace between the parts of JSON, where a request does not set it. Without a limit, a model may
generate whitespace until its tokens run out."""

TOO_LONG = "it takes too long"
"""Of a grammar that one cannot go on to follow."""


class UnsupportedError(ValueError):
    """A grammar needs a feature that the backend does not support; the message names it."""


def first_line(message: str) -> str:
    """The first line of a library's error message, at most 500 characters."""
    return message.strip().partition("\n")[0][:500]
