"""Errors of grammars."""

from __future__ import annotations

import re

SOURCE_LINE = re.compile(r"\d+ \| ")
"""Beginning of a line that quotes the grammar in llguidance's messages."""


class UnsupportedError(ValueError):
    """A grammar needs a feature that llguidance does not support; the message names the feature."""


def one_line(message: str) -> str:
    """Shorten llguidance's error message to one line of at most 500 characters, without the quoted grammar."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line.strip("^ ") and not SOURCE_LINE.match(line))[:500]
