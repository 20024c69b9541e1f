"""Deltas of a message that is streamed."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.text import Message, MessagePart, TextPart, ToolCall

from ..generation import SequenceCursor


@dataclass(slots=True)
class CallDelta:
    """What was added to a tool call."""

    index: int
    """Index of the call in its message."""
    arguments: str
    id: str = ""
    name: str = ""
    """Id and name are set in the first delta of a call."""


Delta = list[TextPart | CallDelta]
"""Parts added to a message, in order. A text that goes on and the arguments of a call that goes on come first."""


class StreamCursor:
    """The position in a sequence and its message up to which they have been sent."""

    def __init__(self) -> None:
        self.progress = SequenceCursor()
        self.num_tool_calls = 0
        """Number of tool calls that were sent, the last one perhaps in part."""
        self._parts = 0
        """Number of parts that were sent, the last one perhaps in part."""
        self._length = 0
        """Characters of the last part that were sent."""

    def delta(self, message: Message) -> Delta:
        """What was added to a message since the last call."""
        delta: Delta = []
        if self._parts:
            delta += self._rest(message.parts[self._parts - 1])
        for part in message.parts[self._parts :]:
            self._parts, self._length = self._parts + 1, 0
            if isinstance(part, ToolCall):
                delta.append(CallDelta(self.num_tool_calls, part.arguments, part.id, part.name))
                self.num_tool_calls += 1
                self._length = len(part.arguments)
            else:
                delta += self._rest(part)
        return delta

    def _rest(self, part: MessagePart) -> Delta:
        """Text added to the last part."""
        text = part.arguments if isinstance(part, ToolCall) else part.text
        added, self._length = text[self._length :], len(text)
        if not added:
            return []
        return [CallDelta(self.num_tool_calls - 1, added) if isinstance(part, ToolCall) else TextPart(part.kind, added)]
