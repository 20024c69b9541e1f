"""A parsed answer: the parts of the assistant's message, in generation order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

TextKind = Literal["reasoning", "content"]


@dataclass(slots=True)
class ToolCall:
    """A tool call. ``arguments`` grows while it is generated."""

    id: str = field(compare=False)
    name: str
    arguments: str = ""
    """JSON object as text: the model's text unmodified if its format is JSON, else converted."""

    @property
    def has_object(self) -> bool:
        """True if ``arguments`` is a complete JSON object."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False


@dataclass(slots=True)
class TextPart:
    """Consecutive reasoning or content text."""

    kind: TextKind
    text: str


MessagePart = TextPart | ToolCall


@dataclass(slots=True)
class Message:
    """The assistant's message so far. Text is appended to its last part, or parts are appended."""

    parts: list[MessagePart] = field(default_factory=list)
    has_cut_head: bool = False
    """True if the answer ended before the arguments of a tool call began; that call is not in ``parts``."""

    @property
    def has_cut_call(self) -> bool:
        """True if the answer ended within a tool call."""
        return self.has_cut_head or self.cut_call is not None

    @property
    def cut_call(self) -> ToolCall | None:
        """The last tool call if the answer ended within its arguments, else None."""
        last = self.parts[-1] if self.parts else None
        return last if isinstance(last, ToolCall) and not last.has_object else None

    def add_text(self, kind: TextKind, text: str) -> None:
        """Append text to the last part if it is of this kind, otherwise as a new part."""
        if not text:
            return
        if self.parts and isinstance(last := self.parts[-1], TextPart) and last.kind == kind:
            last.text += text
        else:
            self.parts.append(TextPart(kind, text))

    @property
    def content(self) -> str:
        """The text of all content parts."""
        return self._text("content")

    @property
    def reasoning_content(self) -> str:
        """The text of all reasoning parts."""
        return self._text("reasoning")

    @property
    def tool_calls(self) -> list[ToolCall]:
        """All tool calls; the last one may still grow."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def _text(self, kind: TextKind) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, TextPart) and part.kind == kind])
