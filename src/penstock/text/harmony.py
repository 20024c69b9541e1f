"""Parser of OpenAI's Harmony response format (2025), in which gpt-oss writes its answers in channels.

An answer has one or more messages, each with a header and a text: ``<|channel|>analysis<|message|>…<|end|>`` is
reasoning, ``<|start|>assistant<|channel|>final<|message|>…`` content, and
``<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`` a tool call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from .markers import partial_match_length, split_at_marker
from .message import MessagePart, TextKind, TextPart, ToolCall
from .reasoning import ReasoningStage
from .tool_calls.brace_scanner import BraceScanner

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
CONSTRAIN, RETURN = "<|constrain|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)
"""Tokens that end a message's text."""
HEADER_STARTS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
"""Possible beginnings of the first header; the prompt ends with ``<|start|>assistant``."""
FUNCTIONS = "functions."
MAX_HEADER = 512
"""Maximum number of characters of a header; a longer text is content."""
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class _Header(NamedTuple):
    channel: str
    recipient: str


class HarmonyParser:
    """Splits an answer into reasoning, content and tool calls.

    Messages in the channel ``analysis`` and messages to built-in tools are reasoning. Messages to a function are tool
    calls. All other messages are content. Messages of the same kind are joined by a line break. A text without a
    header, which a grammar may force, is content.

    Args:
        stage: where the answer begins: before the first header, or within the first message's reasoning or content.
        new_id: generates call ids; None: tools may not be called, and a tool call is content.
        constrained: arguments are JSON, in which a text that looks like a token is part of a string.
    """

    def __init__(self, stage: ReasoningStage, new_id: Callable[[], str] | None, constrained: bool = False) -> None:
        self._constrained = constrained
        self._arguments: BraceScanner | None = None
        """Scanner of the arguments that are being read, if they are constrained."""
        self._call: ToolCall | None = None
        """The call whose arguments are being read."""
        self.found = stage is ReasoningStage.WITHIN
        """True if reasoning has begun."""
        self.in_reasoning = self.found
        self.has_cut_head = False
        """True if the text ended in the header of a tool call, which is dropped."""
        self._new_id = new_id
        self._held = ""
        self._in_header = stage is ReasoningStage.BEFORE
        self._first = True
        """True until the first message has ended."""
        self._has_text = {"reasoning": False, "content": False}
        self._joined = True
        """True if the current message needs no line break before its text."""

    def add(self, text: str, last: bool = False) -> list[MessagePart]:
        """Parse a chunk. Returns the text and the tool calls that begin in it. With ``last`` nothing is held back."""
        self._held += text
        parts: list[MessagePart] = []
        while self._held:
            if self._in_header:
                if not self._read_header(parts, last):
                    break
                continue
            if self._arguments and self._call:
                length, ended = self._arguments.scan(self._held)
                self._call.arguments += self._held[:length]
                self._held = self._held[length:]
                self._arguments = None if ended else self._arguments
                continue
            split = split_at_marker(self._held, ENDS, last, space="")
            self._held, text = split.rest, split.before
            if last and not split.marker:  # drop a truncated marker: text does not contain "<|"
                cut = max(partial_match_length(text, marker) for marker in ENDS)
                text = text[:-cut] if cut > 1 else text
            if self._call:
                self._call.arguments += text
            else:
                kind: TextKind = "reasoning" if self.in_reasoning else "content"
                parts.append(TextPart(kind, self._separated(kind, text)))
            if split.marker is None:
                break
            self._in_header, self._first = True, False
            self._call, self.in_reasoning = None, False
        return parts

    def _separated(self, kind: str, text: str) -> str:
        """Prepend a line break to a message's first text if an earlier message is of the same kind."""
        if not text:
            return ""
        joined, self._joined = self._joined, True
        before = "" if joined or not self._has_text[kind] else "\n"
        self._has_text[kind] = True
        return before + text

    def _read_header(self, parts: list[MessagePart], last: bool) -> bool:
        """Read a header, up to the message's text. Returns False if the header is incomplete."""
        if self._first and not _may_be_header(self._held):
            self._begin(parts, _Header("final", ""))
            return True
        at = self._held.find(MESSAGE, 0, MAX_HEADER + len(MESSAGE))
        if at >= 0:
            header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
            channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
            self._begin(parts, _Header(channel[1] if channel else "", recipient[1] if recipient else ""))
            return True
        is_text = last and self._first and "<|" not in self._held
        if is_text or len(self._held) >= MAX_HEADER + len(MESSAGE):
            self._begin(parts, _Header("final", ""))
            return True
        if last:
            self.has_cut_head = self._new_id is not None and f"to={FUNCTIONS}" in self._held
            self._held = ""
        return False

    def _begin(self, parts: list[MessagePart], header: _Header) -> None:
        """Begin the text of a message."""
        self._in_header, self._joined = False, False
        if header.recipient.startswith(FUNCTIONS) and self._new_id:
            self._call = ToolCall(self._new_id(), header.recipient.removeprefix(FUNCTIONS))
            parts.append(self._call)
            self._arguments = BraceScanner(()) if self._constrained else None
            return
        built_in = bool(header.recipient) and not header.recipient.startswith(FUNCTIONS)
        self.in_reasoning = header.channel == "analysis" or built_in
        self.found = self.found or self.in_reasoning


def _may_be_header(text: str) -> bool:
    """True if the text begins with a header or is the beginning of one."""
    ahead = text.lstrip()
    return any(ahead.startswith(start) or start.startswith(ahead) for start in HEADER_STARTS)
