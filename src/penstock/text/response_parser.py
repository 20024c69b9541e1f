"""Incremental parser that splits an answer into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from .harmony import HarmonyParser
from .markers import split_at_marker
from .message import Message, MessagePart, TextPart, ToolCall
from .reasoning import ReasoningFormat, ReasoningParser, ReasoningStage
from .tool_calls import HARMONY, Schemas, ToolCallFormat, ToolCallParser


@dataclass(frozen=True)
class ParserConfig:
    """Settings for parsing the answer to one prompt."""

    reasoning: ReasoningFormat | None = None
    stage: ReasoningStage = ReasoningStage.AFTER
    """Stage at which the answer begins."""
    continued: bool = False
    """True if the answer continues the last message (``continue_final_message``)."""
    tools: ToolCallFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    """Argument schemas of the available tools."""
    constrained: bool = False
    """True if a grammar ensures that tool calls are well-formed."""
    id_seed: str = ""
    """Text from which the ids of calls are derived; empty: random ids."""

    @property
    def in_channels(self) -> bool:
        """True if the answer is in the Harmony format."""
        return self.tools is HARMONY or bool(self.reasoning and self.reasoning.channels)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be detokenized even if they are special tokens."""
        if self.in_channels:
            return HARMONY.marker_tokens
        form = self.reasoning
        reasoning = (form.start_marker, form.end_marker, *form.marker_tokens) if form else ()
        return (*reasoning, *(self.tools.marker_tokens if self.tools else ()))


class ResponseParser:
    """Parses one answer, which arrives in chunks. ``message`` is the result so far.

    Args:
        hidden: special tokens that are removed from the content unless they are markers.
    """

    def __init__(self, config: ParserConfig, hidden: Collection[str] = ()) -> None:
        self.message = Message()
        form = config.reasoning
        self._reasoning: ReasoningParser | HarmonyParser | None = None
        self._tool_calls: ToolCallParser | None = None
        new_id = _id_generator(config)
        if config.in_channels:
            self._reasoning = HarmonyParser(config.stage, new_id, config.constrained)
        else:
            self._reasoning = ReasoningParser(form, config.stage, config.continued) if form else None
            self._tool_calls = config.tools.parser(config.schemas) if config.tools else None
            if self._tool_calls and new_id:
                self._tool_calls.new_id = new_id
        self._marker_filter = _MarkerFilter((*hidden, *(form.answer_markers if form else ())))

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning has begun."""
        return self._reasoning is not None and self._reasoning.found

    @property
    def in_reasoning(self) -> bool:
        """True while reasoning is being generated."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def add(self, text: str, last: bool = False) -> None:
        """Parse a chunk. With ``last`` nothing is held back."""
        parts: list[MessagePart] = [TextPart("content", text)]
        if self._reasoning:
            parts = self._reasoning.add(text, last)
        for part in parts:
            if self._tool_calls and isinstance(part, TextPart) and part.kind == "content":
                for found in self._tool_calls.add(part.text):
                    self._append(found)
            else:
                self._append(part)
        if self._tool_calls and last:
            for found in self._tool_calls.add("", last=True):
                self._append(found)
            self.message.has_cut_head = self._tool_calls.has_cut_head
        if last and isinstance(self._reasoning, HarmonyParser):
            self.message.has_cut_head = self._reasoning.has_cut_head
        if last:
            self.message.add_text("content", self._marker_filter.flush())

    def _append(self, part: MessagePart) -> None:
        """Append a part to the message; content passes through the marker filter."""
        if isinstance(part, ToolCall):
            self.message.add_text("content", self._marker_filter.flush())
            self.message.parts.append(part)
        elif part.kind == "content":
            self.message.add_text("content", self._marker_filter.add(part.text))
        else:
            self.message.add_text("reasoning", part.text)


def _id_generator(config: ParserConfig) -> Callable[[], str] | None:
    """Generator of call ids; None if tools may not be called."""
    tools, numbers = config.tools, count()
    if tools is None:
        return None
    return lambda: tools.new_id(f"{config.id_seed} {next(numbers)}" if config.id_seed else "")


class _MarkerFilter:
    """Removes markers and the line breaks around them."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._held = ""
        self._skip_newlines = False
        """True after a marker: the line breaks after it are removed."""

    def add(self, text: str) -> str:
        """Filter a chunk of content, and return the text that is not held back."""
        if not self._markers:
            return text
        self._held += text
        return self._filtered(last=False)

    def flush(self) -> str:
        """Return the held-back text. Called when no marker can follow: at a tool call or at the end of the answer."""
        kept = self._filtered(last=True) if self._markers else ""
        self._skip_newlines = False
        return kept

    def _filtered(self, last: bool) -> str:
        kept = ""
        while True:
            if self._skip_newlines:
                self._held = self._held.lstrip("\n")
                self._skip_newlines = not self._held
            split = split_at_marker(self._held, self._markers, last, space="\n")
            kept, self._held = kept + split.before, split.rest
            if split.marker is None:
                return kept
            self._skip_newlines = True
