"""What the parsers of tool calls have in common: they remove calls from streamed text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.text.markers import split_at_marker


@dataclass(slots=True)
class ToolCall:
    """A tool call; ``arguments`` grow while the model writes them."""

    id: str = field(compare=False)
    name: str
    arguments: str = ""
    """A JSON object; as the model wrote it, where it writes JSON."""


class ToolCallParser(ABC):
    """Removes tool calls from a text, with the whitespace around them.

    Text is held back from a start marker on until it is certain that a call begins; if it turns out not to be one, the
    text is passed on as content. From then on arguments are passed on as they are written, so that a stream adds up to
    the whole answer.

    Args:
        start_markers: texts that begin a call.
        allow_unmarked: whether a call at the beginning needs none.
        new_id: makes the id of a call.
    """

    def __init__(self, start_markers: Sequence[str], allow_unmarked: bool, new_id: Callable[[], str]) -> None:
        self.calls: list[ToolCall] = []
        """The calls so far; the last one may still grow."""
        self._start_markers = start_markers
        self._new_id = new_id
        self._held = self._content = ""
        self._gap = self._marker = ""
        """The current start marker, and the whitespace before it."""
        self._step = self._read_start if allow_unmarked else self._read_content

    def add(self, text: str, last: bool = False) -> str:
        """Parse a piece and return the content in it. With ``last`` nothing is held back any more."""
        self._held += text
        self._content = ""
        while self._step(last):
            pass
        return self._content

    # The states of a parser. Each works on the held text and returns whether to continue with the next state.

    def _read_content(self, last: bool) -> bool:
        split = split_at_marker(self._held, self._start_markers, last)
        self._content += split.before
        self._held = split.rest
        if split.marker is None:
            return False
        self._gap, self._marker, self._step = split.gap, split.marker, self._read_start
        return True

    @abstractmethod
    def _read_start(self, last: bool) -> bool:
        """After a start marker, until a call begins or is rejected."""

    def _start_call(self, name: str, arguments: str = "", call_id: str = "") -> None:
        self.calls.append(ToolCall(call_id or self._new_id(), name, arguments))

    def _reject(self) -> bool:
        """Pass the current start marker on as content."""
        self._content += self._gap + self._marker
        self._step = self._read_content
        return True
