"""What answers, and how far an answer has come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .conversation import Message


@dataclass(frozen=True, slots=True)
class Answer:
    """As far as it has come."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """Of all that was said before; None where nobody told."""
    output_tokens: int | None = None
    """Its own; None where nobody told."""


class ContextFull(Exception):
    """A conversation is longer than the model can read."""


class Backend(Protocol):
    """Something that answers."""

    about: str
    """What it is, in words."""
    context: int | None
    """Tokens that a conversation may have; None where nobody told."""

    def answer(self, messages: list[Message], sampling: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
        """The answer so far, whenever it has grown. Leaving the loop ends it.

        Raises ``ContextFull``, or ``PenstockError`` with one sentence where it cannot be had.
        """
