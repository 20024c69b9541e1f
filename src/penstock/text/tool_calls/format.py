"""Base classes of tool call formats and of their incremental parsers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import uuid4

from penstock.text.markers import split_at_marker
from penstock.text.message import MessagePart, TextPart, ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name → JSON schema of its arguments."""


class UnmarkedCalls(NamedTuple):
    """Regular expressions for the beginning of an answer that may be a call without a start marker. Their syntax is
    common to Python and Rust."""

    start: str
    """Character with which the calls begin."""
    heads: Mapping[str, str]
    """Tool name → beginning of a call of the tool, up to its arguments."""
    escape: str
    """Shortest text that is certainly not the beginning of a call."""
    unknown: str
    """Beginning of a call of an unknown tool."""


def text_except(texts: Sequence[str], character: Callable[[str], str], end: str) -> str:
    """Regular expression for a text with ``end`` after it, except for the texts ``texts``.

    Args:
        character: returns the expression for a character of the text that is not in the argument.
        end: expression that does not begin with a character of the text.
    """

    def after(rest: Sequence[str]) -> str:
        firsts = sorted({text[0] for text in rest if text})
        parts = [f"{character(''.join(firsts))}({character('')})*{end}", *([] if "" in rest else [end])]
        parts += [re.escape(first) + after([text[1:] for text in rest if text[:1] == first]) for first in firsts]
        return f"({'|'.join(parts)})"

    return after(texts)


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat(ABC):
    """How a model family writes tool calls. A call begins with a start marker."""

    parsers: tuple[str, ...]
    """Names for ``--tool-call-parser`` (those of vLLM)."""
    template_markers: tuple[str, ...]
    """Texts that identify the family's chat templates; all must be present."""
    excluded_markers: tuple[str, ...] = ()
    """Texts that must be absent from the chat template."""
    start_markers: tuple[str, ...]
    """Texts that begin a call. No marker contains another marker."""
    end_markers: tuple[str, ...] = ()
    """Texts that may follow a call and are part of it."""
    marker_tokens: tuple[str, ...]
    """Texts that must be detokenized even if they are special tokens."""
    allow_unmarked: bool = False
    """True if a call at the beginning of an answer needs no start marker."""
    answer_start: str = ""
    """Text before an answer that may also be calls."""
    single: bool = False
    """True if the model makes one call at a time."""
    constrainable: bool = True
    """False if a start marker also begins other texts, so that a grammar must not apply from it on."""
    escape: str = ""
    """Pattern of the beginning of an answer without a start marker that is no call (``UnmarkedCalls.escape``), if a
    grammar ensures that all others are calls; empty: the parser decides at the end of what may be a call."""

    # Parts of the text of a forced call:
    call_id: tuple[str, int] = ("call_", 24)
    """Prefix of a call id, and number of characters after the prefix; some templates require this form."""
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
        """Return a parser for one answer.

        Args:
            schemas: schemas of the available tools, needed by formats with untyped values.
        """

    @abstractmethod
    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the structural tag format of a forced call's arguments.

        Raises ``PenstockError`` (``unsupported``) if this format cannot enforce the schema.
        """

    def unordered_arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the structural tag format of a call's arguments, in any order if this is possible.

        Raises ``PenstockError`` (``unsupported``) if this format cannot enforce the schema.
        """
        return self.arguments_format(schema)

    @abstractmethod
    def any_arguments_format(self) -> dict[str, Any]:
        """Return the structural tag format of arguments that follow no schema."""

    def before_arguments(self) -> dict[str, Any]:
        """Structural tag format of the text between a call's name and its arguments."""
        return {"type": "const_string", "value": self.call_start[1]}

    def unmarked_calls(self, names: Sequence[str]) -> UnmarkedCalls | None:
        """Return the patterns of calls of these tools without a start marker; None if calls need a start marker."""
        return None

    @property
    def triggers(self) -> tuple[str, ...]:
        """Texts that begin a call in an answer."""
        return self.start_markers

    def heads(self) -> list[str]:
        """Texts from a trigger to the name of the first call, one for each trigger."""
        whole = self.prefix + self.call_start[0]
        unmarked = next((whole[len(one) :] for one in self.triggers if whole.startswith(one)), whole)
        return [whole[whole.index(one) :] if one in whole else one + unmarked for one in self.triggers]

    def written_name(self, name: str) -> str:
        """A tool's name as written between the two texts of ``call_start``."""
        return name

    def matches(self, template: str) -> bool:
        """Check whether a chat template uses this format."""
        present = bool(self.template_markers) and all(text in template for text in self.template_markers)
        return present and not any(text in template for text in self.excluded_markers)

    def new_id(self, seed: str = "") -> str:
        """Generate a call id: a random one, or with ``seed`` always the same."""
        prefix, length = self.call_id
        return prefix + (sha256(seed.encode()).hexdigest() if seed else uuid4().hex)[:length]


class ToolCallParser(ABC):
    """Extracts tool calls, and the whitespace around them, from streamed text.

    Text from a start marker on is held back until it is certain that a call begins; if it is not a call, the text is
    returned as content. After that, arguments are streamed as they are generated.

    Args:
        separators: texts after a call that begin another call without a start marker.
    """

    def __init__(self, form: ToolCallFormat, separators: Sequence[str] = ()) -> None:
        self.calls: list[ToolCall] = []
        """The calls so far; the last one may still grow."""
        self._start_markers, self._end_markers, self._separators = form.start_markers, form.end_markers, separators
        self._escape = re.compile(form.escape, re.DOTALL) if form.escape else None
        self.has_cut_head = False
        """True if the text ended before the arguments of a call began; that call is dropped."""
        self.new_id: Callable[[], str] = form.new_id
        """Generates the id of a call that has none in the text."""
        self._held = ""
        self._parts: list[MessagePart] = []
        """Content, and calls that begin, in the current chunk."""
        self._gap = self._marker = ""
        """Current start marker, and the whitespace before it."""
        self._step = self._read_start if form.allow_unmarked else self._read_content

    def add(self, text: str, last: bool = False) -> list[MessagePart]:
        """Parse a chunk. Returns its content and the calls that begin in it, in order. With ``last`` nothing is held
        back."""
        self._held += text
        self._parts = []
        while self._step(last):
            pass
        return self._parts

    def _is_escaped(self, ahead: str) -> bool:
        """True if the beginning of an answer is no call (``ToolCallFormat.escape``)."""
        is_unmarked = not (self._marker or self.calls)
        return is_unmarked and self._escape is not None and self._escape.match(ahead) is not None

    # States of the parser. Each processes the held text and returns True to continue with the next state.

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
        """Read the text after a start marker, until a call begins or is rejected."""

    def _read_end(self, last: bool) -> bool:
        """Read the text after a call: an end marker, a separator, or content."""
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
        call = ToolCall(call_id or self.new_id(), name, arguments)
        self.calls.append(call)
        self._parts.append(call)

    def _add_content(self, text: str) -> None:
        self._parts.append(TextPart("content", text))

    def _wait_for_head(self, last: bool) -> bool:
        """Wait for the rest of a call's head. At the end of the text the truncated head is dropped."""
        if last and not self._marker and not self.calls:  # the text may also be an answer in JSON
            return self._reject()
        self.has_cut_head = last
        return self._wait_for_end(last)

    def _wait_for_end(self, last: bool) -> bool:
        """Wait for the rest of a marker after a call. At the end of the text the truncated marker is dropped."""
        if last:
            self._held, self._step = "", self._read_content
        return False

    def _reject(self) -> bool:
        """Return the current start marker as content."""
        self._add_content(self._gap + self._marker)
        self._step = self._read_content
        return True
