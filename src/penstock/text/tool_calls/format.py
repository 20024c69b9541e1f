"""What all formats of tool calls have in common, and their parsers, which remove calls from streamed text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from penstock.text.markers import split_at_marker
from penstock.text.message import MessagePart, TextPart, ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool → JSON schema of its arguments."""


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat(ABC):
    """How a family of models writes tool calls. A call begins with a start marker."""

    parsers: tuple[str, ...]
    """Names of ``--tool-call-parser``, which are vLLM's."""
    template_markers: tuple[str, ...]
    """Texts by which the family's chat templates are recognized; all of them must be present."""
    excluded_markers: tuple[str, ...] = ()
    """Texts that must not be present."""
    start_markers: tuple[str, ...]
    """Each of them begins a call; none contains another."""
    end_markers: tuple[str, ...] = ()
    """Texts that may follow a call and belong to it."""
    marker_tokens: tuple[str, ...]
    """Texts of this format that may be special tokens; they are detokenized nevertheless."""
    allow_unmarked: bool = False
    """Whether a call at the beginning of an answer needs no start marker."""

    # How a forced call is written:
    call_id: tuple[str, int] = ("call_", 24)
    """Prefix of a call's id, and number of characters after it; some templates accept no others."""
    prefix: str = ""
    """Text before the first call."""
    call_start: tuple[str, str]
    """Text before and after a call's name."""
    call_end: str = ""
    """Text after a call's arguments."""
    separator: str = ""
    """Text between two calls."""
    suffix: str = ""
    """Text after the last call."""

    @abstractmethod
    def parser(self, schemas: Schemas) -> ToolCallParser:
        """A parser of one answer.

        Args:
            schemas: those of the tools that are known; formats whose values have no types need them.
        """

    @abstractmethod
    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a forced call as a format of a structural tag.

        Raises ``PenstockError`` (``unsupported``) where they cannot follow the schema in this format.
        """

    def written_name(self, name: str) -> str:
        """A tool's name as it stands between ``call_start``."""
        return name

    def matches(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        present = all(text in template for text in self.template_markers)
        return present and not any(text in template for text in self.excluded_markers)

    def new_id(self) -> str:
        """A new id for a call."""
        prefix, length = self.call_id
        return prefix + uuid4().hex[:length]


class ToolCallParser(ABC):
    """Removes tool calls from a text, with the whitespace around them.

    Text is held back from a start marker on until it is certain that a call begins; if it turns out not to be one, the
    text is passed on as content. From then on arguments are passed on as they are written, so that a stream adds up to
    the whole answer.

    Args:
        form: how calls are written.
        separators: texts after a call that begin another one without a start marker.
    """

    def __init__(self, form: ToolCallFormat, separators: Sequence[str] = ()) -> None:
        self.calls: list[ToolCall] = []
        """The calls so far; the last one may still grow."""
        self._start_markers, self._end_markers, self._separators = form.start_markers, form.end_markers, separators
        self._new_id = form.new_id
        self._held = ""
        self._parts: list[MessagePart] = []
        """Content, and calls that begin, in the current piece."""
        self._gap = self._marker = ""
        """The current start marker, and the whitespace before it."""
        self._step = self._read_start if form.allow_unmarked else self._read_content

    def add(self, text: str, last: bool = False) -> list[MessagePart]:
        """Parse a piece; returns the content and the calls that begin in it, in order.

        With ``last`` nothing is held back any more.
        """
        self._held += text
        self._parts = []
        while self._step(last):
            pass
        return self._parts

    # The states of a parser. Each works on the held text and returns whether to continue with the next state.

    def _read_content(self, last: bool) -> bool:
        split = split_at_marker(self._held, self._start_markers, last)
        self._add_content(split.before)
        self._held = split.rest
        if split.marker is None:
            return False
        self._gap, self._marker, self._step = split.gap, split.marker, self._read_start
        return True

    @abstractmethod
    def _read_start(self, last: bool) -> bool:
        """After a start marker, until a call begins or is rejected."""

    def _read_end(self, last: bool) -> bool:
        """Behind a call: what belongs to it, another one, or content."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        for text in (*self._end_markers, *self._separators):
            if self._held.startswith(text):
                self._held = self._held[len(text) :]
                if text in self._separators:
                    self._gap, self._marker, self._step = "", text, self._read_start
                return True
            if text.startswith(self._held):
                return self._wait_for_end(last)
        self._step = self._read_content
        return True

    def _start_call(self, name: str, arguments: str = "", call_id: str = "") -> None:
        call = ToolCall(call_id or self._new_id(), name, arguments)
        self.calls.append(call)
        self._parts.append(call)

    def _add_content(self, text: str) -> None:
        self._parts.append(TextPart("content", text))

    def _wait_for_head(self, last: bool) -> bool:
        """Wait for the rest of a call's head. At the end of the text it is dropped, as it was cut off."""
        if last and not self._marker and not self.calls:  # it may as well be an answer in JSON
            return self._reject()
        return self._wait_for_end(last)

    def _wait_for_end(self, last: bool) -> bool:
        """Wait for the rest of a marker after a call. At the end of the text, what there is of it is dropped."""
        if last:
            self._held, self._step = "", self._read_content
        return False

    def _reject(self) -> bool:
        """Pass the current start marker on as content."""
        self._add_content(self._gap + self._marker)
        self._step = self._read_content
        return True
