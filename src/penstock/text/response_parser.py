"""An answer's text taken apart as it comes: thought, content, calls. Streams and whole answers are both read so."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .markers import split
from .reasoning import ReasoningFormat, ReasoningParser, Stage
from .tool_calls import ToolCall, ToolCallFormat, ToolCallParser


@dataclass(slots=True)
class Message:
    """What an assistant says, so far."""

    content: str = ""
    reasoning_content: str = ""
    """The thought before it."""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class ParserConfig:
    """How the answer to one prompt is to be read."""

    thought: ReasoningFormat | None = None
    stage: Stage = Stage.AFTER
    """Where the prompt leaves the answer."""
    continued: bool = False
    """Whether the answer goes on with the last message's text."""
    tools: ToolCallFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """What has to be in the text, be they special tokens or not."""
        thought = (self.thought.opened, self.thought.closed) if self.thought else ()
        return (*thought, *(self.tools.tokens if self.tools else ()))


class ResponseParser:
    """Reads one answer.

    Args:
        hidden: texts of special tokens, which are no content where they turn out to mark nothing.
    """

    def __init__(self, reading: ParserConfig, hidden: Collection[str] = ()) -> None:
        self.message = Message()
        self._thoughts = ReasoningParser(reading.thought, reading.stage, reading.continued) if reading.thought else None
        self._calls = ToolCallParser(reading.tools) if reading.tools else None
        if self._calls:
            self.message.tool_calls = self._calls.calls
        self._dropped = _Dropped((*hidden, *(reading.thought.wrapped if reading.thought else ())))

    @property
    def thought(self) -> bool:
        """Whether a thought has begun."""
        return self._thoughts is not None and self._thoughts.thought

    @property
    def thinking(self) -> bool:
        """Whether it goes on."""
        return self._thoughts is not None and self._thoughts.stage is Stage.WITHIN

    def add(self, text: str, last: bool = False) -> None:
        """Take in a piece; with ``last`` nothing is held back any more."""
        message = self.message
        if self._thoughts:
            thought, text = self._thoughts.add(text, last)
            message.reasoning_content += thought
        if self._calls:
            text = self._calls.add(text, last)
        message.content += self._dropped.add(text, last)


class _Dropped:
    """Leaves marks out, with the line breaks around them."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._held = ""
        self._fresh = False
        """Whether line breaks after a mark may come."""

    def add(self, text: str, last: bool) -> str:
        if not self._marks:
            return text
        self._held += text
        said = ""
        while True:
            if self._fresh:
                self._held = self._held.lstrip("\n")
                self._fresh = not self._held
            found = split(self._held, self._marks, last, space="\n")
            said, self._held = said + found.before, found.rest
            if found.mark is None:
                return said
            self._fresh = True
