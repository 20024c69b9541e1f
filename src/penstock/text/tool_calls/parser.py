"""Parses tool calls in streamed text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from penstock.text.markers import split_at_marker

from .brace_scanner import BraceScanner
from .formats import ToolCallFormat

NAME_AND_ARGUMENTS = re.compile(
    r'\{\s*("tool_call_id"\s*:\s*"[^"\\]{0,64}"\s*,\s*)?"(tool_)?name"\s*:\s*"(?P<name>([^"\\]|\\.){1,256})"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)'
)
"""The beginning of an object of name and arguments, up to the arguments."""
MAX_NAME_LENGTH = 512
"""Characters between a start marker and the arguments, where the name is there."""


@dataclass(slots=True)
class ToolCall:
    """A tool call; ``arguments`` grow while the model writes them."""

    id: str = field(compare=False)
    name: str
    arguments: str = ""
    """A JSON object as the model wrote it."""


class ToolCallParser:
    """Removes tool calls from a text, with the whitespace around them.

    Text is held back from a start marker on until the name and the opening brace of the arguments have been read; if it
    turns out not to be a call, it is passed on as content. From the opening brace on, the arguments are passed on as
    they are written: to their closing brace, to the next marker, or to the end of the text. So a stream adds up to the
    whole answer; the arguments may be invalid JSON, as they may with OpenAI. An object in which the name does not come
    first is held back until it is complete.
    """

    def __init__(self, form: ToolCallFormat) -> None:
        self.calls: list[ToolCall] = []
        """The calls so far; the last one may still grow."""
        self._form = form
        self._held = self._content = ""
        self._gap = self._marker = ""
        """The current start marker, and the whitespace before it."""
        self._scanner = BraceScanner(form.stops)
        self._scanned = 0
        """Characters of the held text that were scanned, of an object that is held back as a whole."""
        self._in_object = False
        """Whether the arguments are in one object with the name."""
        self._step = self._read_start if form.allow_unmarked else self._read_content

    def add(self, text: str, last: bool = False) -> str:
        """Parse a piece and return the content in it. With ``last`` nothing is held back any more."""
        self._held += text
        self._content = ""
        while self._step(last):
            pass
        return self._content

    # The states of the parser. Each works on the held text and returns whether to continue with the next state.

    def _read_content(self, last: bool) -> bool:
        split = split_at_marker(self._held, self._form.start_markers, last)
        self._content += split.before
        self._held = split.rest
        if split.marker is None:
            return False
        self._gap, self._marker, self._step = split.gap, split.marker, self._read_start
        return True

    def _read_start(self, last: bool) -> bool:
        """Between a start marker and the first brace."""
        form, ahead = self._form, self._held.lstrip(self._form.lead)
        if not ahead and not last:
            return False
        if ahead.startswith("{"):
            self._scanned, self._scanner, self._step = 0, BraceScanner(form.stops), self._read_object
            return True
        at = self._held.find("{")
        if form.name_pattern is None:
            return self._reject()
        if at < 0 and len(self._held) <= MAX_NAME_LENGTH and not last:
            return False
        match = form.name_pattern.fullmatch(self._held, 0, at) if 0 <= at <= MAX_NAME_LENGTH else None
        if match is None:
            return self._reject()
        self._start_call(next(name for name in match.groupdict().values() if name), in_object=False)
        self._held = self._held[at:]
        return True

    def _read_object(self, last: bool) -> bool:
        """In an object of name and arguments, before the arguments."""
        ahead = self._held.lstrip(self._form.lead)
        if head := NAME_AND_ARGUMENTS.match(ahead):
            self._start_call(_string(head["name"]), in_object=True)
            self._held = ahead[head.end() :]
            return True
        length, ended = self._scanner.scan(ahead[self._scanned :], last)
        self._scanned += length
        if not ended:
            if last:  # an unclosed object is content as a whole; searching it again would take quadratic time
                self._content += self._gap + self._marker + self._held
                self._held, self._step = "", self._read_content
            return False
        call = _call(ahead[: self._scanned])
        if call is None:
            return self._reject()
        self.calls.append(ToolCall(self._form.new_id(), *call))
        self._held, self._step = ahead[self._scanned :], self._read_end
        return True

    def _read_arguments(self, last: bool) -> bool:
        length, ended = self._scanner.scan(self._held, last)
        self.calls[-1].arguments += self._held[:length]
        self._held = self._held[length:]
        if not ended:
            return False
        self._scanner = BraceScanner(self._form.stops, depth=1)
        self._step = self._skip_object_end if self._in_object else self._read_end
        return True

    def _skip_object_end(self, last: bool) -> bool:
        """After the arguments, to the end of the object; fields other than name and arguments are ignored."""
        length, ended = self._scanner.scan(self._held, last)
        self._held = self._held[length:]
        if ended:
            self._step = self._read_end
        return ended

    def _read_end(self, last: bool) -> bool:
        form = self._form
        self._held = self._held.lstrip()
        for text in (*form.end_markers, *form.separators):
            if self._held.startswith(text):
                self._held = self._held[len(text) :]
                if text in form.separators:
                    self._gap, self._marker, self._step = "", text, self._read_start
                return True
            if not last and text.startswith(self._held):
                return False
        if form.allow_unmarked and self._held.startswith("{"):
            self._gap, self._marker, self._step = "", "", self._read_start
        else:
            self._step = self._read_content
        return True

    def _start_call(self, name: str, in_object: bool) -> None:
        self.calls.append(ToolCall(self._form.new_id(), name))
        self._in_object, self._scanner, self._step = in_object, BraceScanner(self._form.stops), self._read_arguments

    def _reject(self) -> bool:
        """Pass the current start marker on as content."""
        self._content += self._gap + self._marker
        self._step = self._read_content
        return True


def _string(written: str) -> str:
    """The value of a JSON string; the text itself where it is invalid."""
    try:
        name = str(json.loads(f'"{written}"', strict=False))
        return name if _is_text(name) else written
    except ValueError:
        return written


def _is_text(text: str) -> bool:
    """Whether a text can be encoded as UTF-8, that is, has no unpaired surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _call(written: str) -> tuple[str, str] | None:
    """Name and arguments of a complete object; None where it is not a call."""
    try:
        document = json.loads(written)
        name = document["tool_name"] if "tool_name" in document else document["name"]
        arguments = document.get("arguments", document.get("parameters")) or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str) and not _is_text(text):
            text = json.dumps(arguments)
        good = isinstance(name, str) and isinstance(json.loads(text), dict)  # text is JSON within JSON
        good = good and _is_text(name + text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (name, text) if good else None
