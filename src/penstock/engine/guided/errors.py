"""Errors of grammars."""

from __future__ import annotations

import re

SOURCE_LINE = re.compile(r"\d+ \| ")
"""A line of the grammar, which llguidance's messages repeat."""


class UnsupportedError(ValueError):
    """A grammar needs a feature that llguidance does not support; the message names it."""


def one_line(message: str) -> str:
    """A library's error message on one line, at most 500 characters, without the excerpt of the grammar's source."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line.strip("^ ") and not SOURCE_LINE.match(line))[:500]
