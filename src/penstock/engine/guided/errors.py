"""Errors of grammars, and limits of theirs."""

from __future__ import annotations

import re

MAX_WHITESPACE = 32
"""Characters of whitespace between the parts of JSON, where a request does not set it. Without a limit, a model may
generate whitespace until its tokens run out."""

SOURCE_LINE = re.compile(r"\d+ \| ")
"""A line of the grammar, which llguidance's messages repeat."""
TOO_LONG = "it takes too long"
"""Of a grammar that one cannot go on to follow."""


class UnsupportedError(ValueError):
    """A grammar needs a feature that llguidance does not support; the message names it."""


def one_line(message: str) -> str:
    """A library's error message on one line, at most 500 characters, without the excerpt of the grammar's source."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line.strip("^ ") and not SOURCE_LINE.match(line))[:500]
