"""Search for the beginning of a tool call in generated tokens, in accordance with the parser of the answer."""

from __future__ import annotations

import re
import string
from enum import Enum, auto
from typing import Literal, NamedTuple

from penstock.core import ToolCallParams

from .token_texts import MarkerTokens

SPACE = string.whitespace.encode()
MAX_HEADER = 512
"""Maximum number of bytes of a message's header (``text.harmony``); a longer text is the message's text."""


class Trigger(NamedTuple):
    """A trigger that has been found."""

    text: str
    rest: bytes
    """Part of the last token after the trigger."""
    at_start: bool = False
    """True for a start trigger, which may also begin an answer that is no call."""


class Part(Enum):
    """Part of the output to which the next text belongs."""

    BEFORE = auto()  # reasoning or answer
    REASONING = auto()
    START = auto()  # answer, with only whitespace so far
    ANSWER = auto()
    FIRST_HEADER = auto()  # header or text of the first message, with ``ToolCallParams.header``
    HEADER = auto()  # header of a message, with ``ToolCallParams.header``
    MESSAGE = auto()  # text of a message, with ``ToolCallParams.header``


SKIPPABLE = frozenset((Part.REASONING, Part.ANSWER, Part.MESSAGE))
"""Parts in which tokens without the beginning of a marker have no effect."""


class ToolCallScanner:
    """Searches the output of a sequence for a trigger.

    Args:
        stage: ``EngineRequest.stage``.
    """

    __slots__ = ("_held", "_params", "_part", "_tokens")

    def __init__(self, params: ToolCallParams, tokens: MarkerTokens, stage: str) -> None:
        self._params = params
        self._tokens = tokens
        self._held = b""
        """End of the text so far that belongs to the search: in most parts, the prefix of a marker."""
        if params.header:
            self._part = Part.FIRST_HEADER if stage == "before" else Part.MESSAGE
        else:
            stages = {"before": Part.BEFORE, "within": Part.REASONING, "after": Part.START}
            self._part = stages[stage if params.reasoning else "after"]

    def copy(self) -> ToolCallScanner:
        copy = ToolCallScanner.__new__(ToolCallScanner)
        copy._params, copy._tokens, copy._held, copy._part = self._params, self._tokens, self._held, self._part
        return copy

    def skips(self, tokens: list[int]) -> bool:
        """True if no marker begins or ends in these tokens."""
        return not self._held and self._part in SKIPPABLE and self._tokens.starters.isdisjoint(tokens)

    def add(self, token: int) -> Trigger | None:
        """Continue with a token. Returns the trigger that is complete with it; the search ends with a trigger."""
        if not self._held and token not in self._tokens.starters and self._part in SKIPPABLE:
            return None
        self._held += self._tokens.texts[token]
        while (found := self._step()) is True:
            pass
        return found or None

    def skip_start(self, text: bytes) -> Trigger | None:
        """Continue after a start trigger that did not begin a call. Returns the first other trigger in ``text``, the
        answer so far."""
        self._part, self._held = Part.ANSWER, text
        return self._answer() or None

    def _step(self) -> Trigger | bool:
        """Process the held text. Returns True if it has to be called again, False if more text is needed."""
        match self._part:
            case Part.BEFORE:
                return self._before()
            case Part.REASONING:
                assert self._params.reasoning
                return self._find(self._params.reasoning[1], Part.START)
            case Part.START:
                return self._start()
            case Part.FIRST_HEADER:
                return self._first_header()
            case Part.HEADER:
                return self._header()
            case Part.MESSAGE:
                return self._message()
        return self._answer()

    def _before(self) -> bool:
        assert self._params.reasoning
        start, ahead = self._params.reasoning[0].encode(), self._held.lstrip(SPACE)
        if start.startswith(ahead) and ahead != start:
            self._held = ahead
            return False
        if ahead.startswith(start):
            self._part, self._held = Part.REASONING, ahead[len(start) :]
        else:
            self._part = Part.START
        return True

    def _find(self, marker: str, following: Part) -> bool:
        """Search for ``marker``, which ends this part."""
        _, found, rest = self._held.partition(marker.encode())
        if found:
            self._part, self._held = following, rest
            return True
        self._hold_partial()
        return False

    def _start(self) -> Trigger | bool:
        if not (ahead := self._held.lstrip(SPACE)):
            self._held = b""
            return False
        self._part = Part.ANSWER
        if (trigger := self._params.start_trigger) and ahead.startswith(trigger.encode()):
            self._held = b""
            return Trigger(trigger, ahead[len(trigger) :], at_start=True)
        return True

    def _answer(self) -> Trigger | Literal[False]:
        found = [(at, trigger) for trigger in self._params.triggers if (at := self._held.find(trigger.encode())) >= 0]
        if not found:
            self._hold_partial()
            return False
        at, trigger = min(found)
        rest, self._held = self._held[at + len(trigger.encode()) :], b""
        return Trigger(trigger, rest)

    def _first_header(self) -> bool:
        assert self._params.header
        ahead, starts = self._held.lstrip(SPACE), [start.encode() for start in self._params.header.first_starts]
        if any(start.startswith(ahead) for start in starts) and ahead not in starts:
            return False
        self._part = Part.HEADER if ahead.startswith(tuple(starts)) else Part.MESSAGE
        return True

    def _header(self) -> Trigger | bool:
        assert self._params.header
        (trigger,), end = self._params.triggers, self._params.header.end
        before, ended, rest = self._held.partition(end.encode())
        if match := re.search(rb"\b" + re.escape(trigger.encode()), before):
            rest, self._held = self._held[match.end() :], b""
            return Trigger(trigger, rest)
        if ended:
            self._part, self._held = Part.MESSAGE, rest
            return True
        if len(self._held) > MAX_HEADER:
            self._part = Part.MESSAGE
            return True
        return False

    def _message(self) -> bool:
        assert self._params.header
        starts = self._params.header.starts
        found = [(at, start) for start in starts if (at := self._held.find(start.encode())) >= 0]
        if not found:
            self._hold_partial()
            return False
        at, start = min(found)
        self._part, self._held = Part.HEADER, self._held[at + len(start.encode()) :]
        return True

    def _hold_partial(self) -> None:
        self._held = self._held[len(self._held) - self._tokens.partial(self._held) :]
