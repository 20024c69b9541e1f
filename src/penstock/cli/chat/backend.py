"""Interface of chat backends: a local engine or a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from .conversation import Conversation, Message
from .tools import ToolCall


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer generated so far."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls. Until the answer ends, the arguments of the last call may be incomplete."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """Number of prompt tokens; None: unknown."""
    output_tokens: int | None = None
    """Number of output tokens; None: unknown."""


class ContextFull(Exception):
    """The conversation exceeds the model's context."""


class Backend(Protocol):
    """Source of answers: a local engine, or a model on a server."""

    about: str
    """Description for the user."""
    context: int | None
    """Context length in tokens; None: unknown."""

    def answer(self, messages: list[Message], conversation: Conversation) -> AsyncGenerator[Answer, None]:
        """Generate an answer to ``messages`` with the conversation's tools and parameters. Yields the answer so far
        whenever it grows; closing the generator stops it.

        Raises ``ContextFull``, or ``PenstockError`` with a one-sentence message.
        """
