"""Deltas of a message that is streamed."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.text import Message, ToolCall

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


@dataclass(slots=True)
class Delta:
    """What a step added to a message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class StreamCursor:
    """The position in a sequence and its message up to which they have been sent."""

    def __init__(self) -> None:
        self.progress = SequenceCursor()
        self._content = self._thought = 0
        self._arguments: list[int] = []
        """For each tool call sent so far: number of characters of its arguments that were sent."""

    @property
    def num_tool_calls(self) -> int:
        """Number of tool calls that were sent, the last one perhaps in part."""
        return len(self._arguments)

    def delta(self, message: Message) -> Delta:
        """What was added to a message since the last call."""
        thought, content = message.reasoning_content[self._thought :], message.content[self._content :]
        self._thought += len(thought)
        self._content += len(content)
        started = max(self.num_tool_calls - 1, 0)
        parts = [self._part(i, call) for i, call in enumerate(message.tool_calls[started:], started)]
        return Delta(thought, content, [part for part in parts if part])

    def _part(self, index: int, call: ToolCall) -> CallDelta | None:
        """What was added to the last call, or a new call."""
        if index == self.num_tool_calls:
            self._arguments.append(len(call.arguments))
            return CallDelta(index, call.arguments, call.id, call.name)
        new = call.arguments[self._arguments[index] :]
        self._arguments[index] += len(new)
        return CallDelta(index, new) if new else None
