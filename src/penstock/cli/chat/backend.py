"""The interface to a model: a local engine or a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from .conversation import Conversation, Message
from .tools import ToolCall


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer so far."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls; the arguments of the last one may be incomplete before the answer ends."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """Tokens of the prompt; None where unknown."""
    output_tokens: int | None = None
    """Tokens of the answer; None where unknown."""


class ContextFull(Exception):
    """Raised where the conversation exceeds the model's context."""


class Backend(Protocol):
    """A model that answers."""

    about: str
    """Description for the user."""
    context: int | None
    """Context length in tokens; None where unknown."""

    def answer(self, messages: list[Message], conversation: Conversation) -> AsyncGenerator[Answer, None]:
        """The answer to ``messages`` so far, whenever it has grown, with the conversation's tools and parameters.
        Leaving the loop ends it.

        Raises ``ContextFull``, or ``PenstockError`` with one sentence where it cannot be had.
        """
