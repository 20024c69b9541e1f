"""Breaks in the content of messages, so that control tokens typed by a user are encoded as plain text.

Chat templates render these texts together with their own control tokens. The content gets its breaks before that.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from .control_tokens import BREAK, ControlTokens, insert_breaks
from .reasoning import ReasoningFormat
from .tool_calls import ToolCallFormat

ESCAPED = (json.dumps(BREAK)[1:-1], quote(BREAK))
"""``BREAK`` after the filters ``tojson(ensure_ascii=true)`` and ``urlencode``."""
OPTIONS = ("tools", "documents")
"""Options of a rendering that have content of users or third parties."""

Messages = Sequence[Mapping[str, Any]]


def with_message_breaks(
    messages: Messages, options: Mapping[str, Any], tokens: ControlTokens, assistant_tokens: Collection[str]
) -> tuple[Messages, Mapping[str, Any]] | None:
    """Return the messages and options of a rendering with breaks in all control tokens; None if there are none.

    Args:
        messages, options: arguments of ``ChatTemplate.render``.
        assistant_tokens: control tokens that stay tokens in the messages of the assistant.
    """
    breaker = _Breaker(tokens)
    converted = [breaker.message(message, assistant_tokens) for message in messages]
    given = {name: options[name] for name in OPTIONS if options.get(name)}
    changes = {name: breaker.convert(value) for name, value in given.items() if tokens.may_occur(value)}
    return (converted, {**options, **changes}) if breaker.changed else None


def restore_breaks(text: str) -> str:
    """Undo escapes of ``BREAK`` by filters of a chat template."""
    for escaped in ESCAPED:
        text = text.replace(escaped, BREAK)
    return text


def markers(reasoning: ReasoningFormat | None, tools: ToolCallFormat | None) -> str:
    """All markers of an answer's formats, one per line."""
    found: list[str] = []
    if reasoning:
        found += [reasoning.start_marker, reasoning.end_marker, *reasoning.answer_markers, reasoning.begin]
        found += [reasoning.before_answer, reasoning.before_call]
    if tools:
        found += [*tools.start_markers, *tools.end_markers, *tools.marker_tokens, tools.prefix, *tools.call_start]
        found += [tools.call_end, tools.separator, tools.suffix]
    return "\n".join(found)


class _Breaker:
    """Inserts breaks into the texts of one chat."""

    def __init__(self, tokens: ControlTokens) -> None:
        self.changed = False
        """True if a break was inserted."""
        self._tokens = tokens
        self._before = ""
        """Previous text of a message's content."""

    def message(self, message: Mapping[str, Any], assistant_tokens: Collection[str]) -> Mapping[str, Any]:
        exempt = assistant_tokens if message.get("role") == "assistant" else ()
        result: dict[str, Any] = {}
        for name, value in message.items():
            if name == "role":
                result[name] = value
            elif name == "content":
                result[name] = self._content(value, exempt)
            else:
                result[name] = self.convert(value, () if name == "tool_calls" else exempt)
        return result

    def _content(self, content: Any, exempt: Collection[str]) -> Any:
        if isinstance(content, str):
            return self._text(content, exempt)
        if not isinstance(content, (list, tuple)):
            return self.convert(content, exempt)
        return [
            {**part, "text": self._text(part["text"], exempt)}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else self.convert(part, exempt)
            for part in content
        ]

    def _text(self, text: str, exempt: Collection[str]) -> str:
        """Insert breaks into a text, also before it if a control token spans it and the text before it: templates may
        concatenate them, without the spaces around them."""
        result: str = self.convert(text, exempt)
        if self._tokens.join(self._before.rstrip(), text.lstrip()):
            at = len(text) - len(text.lstrip())
            result, self.changed = f"{result[:at]}{BREAK}{result[at:]}", True
        self._before = text
        return result

    def convert(self, value: Any, exempt: Collection[str] = ()) -> Any:
        """Insert breaks into all texts of a JSON value, including the names in objects."""
        if isinstance(value, str):
            offsets = self._tokens.find(value, exempt)
            self.changed |= bool(offsets)
            return insert_breaks(value, offsets) if offsets else value
        if isinstance(value, Mapping):
            return {self.convert(name, exempt): self.convert(each, exempt) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.convert(each, exempt) for each in value]
        return value
