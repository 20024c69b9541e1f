"""What the parsers of tool calls have in common: they remove calls from streamed text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.text.markers import split_at_marker
from penstock.text.message import MessagePart, TextPart, ToolCall

if TYPE_CHECKING:
    from .format import ToolCallFormat


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
