"""Tool calls in a model's text, in the form of Hermes and Qwen, found however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.core.guided import STRICT

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object as text."""


class Parsed(NamedTuple):
    content: str
    """What is said besides."""
    calls: list[ToolCall]


class ToolCalls:
    """Takes ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` out of a text, with the space around it.

    What may belong to a call is held back until it is known; what turns out to be none is text, as it was written.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._gap = ""
        """Space before the call at hand."""
        self._after = False
        """Whether a call has just ended, and space is still to be dropped."""

    def add(self, text: str, last: bool = False) -> Parsed:
        """Take in a piece; with ``last`` nothing is held back any more."""
        self._held += text
        content, calls = "", list[ToolCall]()
        while True:
            if self._inside:
                body, closed, rest = self._held.partition(CLOSE)
                if not closed and not last:
                    return Parsed(content, calls)
                self._inside, self._held = False, rest
                if closed and (call := _call(body)):
                    calls.append(call)
                    self._after = True
                else:
                    content += self._gap + OPEN + body + closed
            if self._after:
                self._held = self._held.lstrip()
                self._after = not self._held
            before, opened, rest = self._held.partition(OPEN)
            if opened:
                said = before.rstrip()
                content, self._gap = content + said, before[len(said) :]
                self._inside, self._held = True, rest
                continue
            keep = 0 if last else _may_begin(self._held)
            at = len(self._held) - keep
            content, self._held = content + self._held[:at], self._held[at:]
            return Parsed(content, calls)


def grammar_of(tools: Mapping[str, Mapping[str, Any]], is_token: Callable[[str], bool], several: bool) -> str:
    """A grammar of nothing but calls, as the model writes them by itself.

    Args:
        tools: names with the schemas of their arguments.
        is_token: whether the vocabulary has a token of that text.
        several: whether more than one call may come.
    """
    options = STRICT | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    opened, closed = (mark if is_token(mark) else json.dumps(mark) for mark in (OPEN, CLOSE))
    more = r' ("\n" call)*' if several else ""
    rules = [
        f"start: call{more}",
        rf'call: {opened} "\n" ({" | ".join(f"tool_{i}" for i in range(len(tools)))}) "\n" {closed}',
    ]
    # Each has a schema of its own, to which its references point.
    for i, (name, arguments) in enumerate(tools.items()):
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        rules.append(f'tool_{i}: {json.dumps(begin)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps({**arguments, 'x-guidance': options})}")
    return "\n".join(rules) + "\n"


def _may_begin(text: str) -> int:
    """How long an end of ``text`` may belong to a call: the beginning of its mark, and the space before."""
    begun = next((n for n in range(min(len(text), len(OPEN) - 1), 0, -1) if OPEN.startswith(text[-n:])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())


def _call(body: str) -> ToolCall | None:
    try:
        found = json.loads(body)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
