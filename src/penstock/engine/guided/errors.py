"""What a grammar cannot ask for, and how others' errors are told."""

from __future__ import annotations

WHITESPACE = 32
"""Characters between the parts of JSON, where nothing else is asked for: bounded, or a model might write nothing
else."""


class UnsupportedError(ValueError):
    """A form asks for what a backend cannot keep to; the message names it."""


def first_line(words: str) -> str:
    """What is told of another's error."""
    return words.strip().partition("\n")[0][:500]
