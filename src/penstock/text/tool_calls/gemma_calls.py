"""Tool calls of Gemma: ``call:get_weather{city:<|"|>Paris<|"|>,days:3}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.markers import partial_match_length, split_at_marker

from .forced_values import (
    Format,
    arguments_sequence,
    choice,
    const_string,
    is_plain_array,
    is_plain_object,
    json_format,
    repeated,
    sequence,
    string_format,
    text_without,
    typed_formats,
)
from .format import Schemas, ToolCallFormat, ToolCallParser
from .values import Types, json_text, typed_value, types_of

HEAD = re.compile(r"\s*call:([\w.:/-]{1,128})\{", re.ASCII)
"""Pattern of the text between a start marker and the arguments."""
HEAD_SO_FAR = re.compile(r"\s*(c(a(l(l(:[\w.:/-]{0,128})?)?)?)?)?", re.ASCII)
"""Pattern of a text that may become a match of ``HEAD``."""
KEY = re.compile(r"[^\s<>\"'{}\[\]:,|]{1,128}")
"""Pattern of the parameter names that can be written."""
MAX_KEY_LENGTH = 512
MAX_NESTED = 3
"""Maximum depth of the objects and arrays that forced calls write in Gemma's syntax; deeper values are JSON."""
CLOSES = {"{": "}", "[": "]"}


@dataclass(frozen=True, kw_only=True)
class GemmaFormat(ToolCallFormat):
    """Calls with arguments in a syntax like JSON's, with names without quotes, and strings between two tokens."""

    quote: str
    """Text before and after a string."""

    def parser(self, schemas: Schemas) -> ToolCallParser:
        return _GemmaCallParser(self, schemas)

    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return self._members(schema, schema, 0)

    def unordered_arguments_format(self, schema: Mapping[str, Any]) -> Format:
        return self._members(schema, schema, 0, any_order=True)

    def any_arguments_format(self) -> Format:
        quote = const_string(self.quote)
        value = choice([sequence([quote, text_without(self.quote), quote]), json_format({"type": "number"}, {})])
        return repeated(sequence([{"type": "regex", "pattern": KEY.pattern}, const_string(":"), value]), ",")

    def _members(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int, any_order: bool = False
    ) -> Format:
        """Format of the members of an object, without its braces."""
        elements: dict[str, Format] = {
            name: {"type": "tag", "begin": f"{name}:", "content": self._value(part, root, depth), "end": ""}
            for name, part in schema.get("properties", {}).items()
        }
        return arguments_sequence(schema, elements, ",", KEY, any_order)

    def _value(self, schema: Any, root: Mapping[str, Any], depth: int) -> Format:
        """Format of a value."""

        def string(found: Mapping[str, Any]) -> Format:
            return {"type": "tag", "begin": self.quote, "content": string_format(found, self.quote), "end": self.quote}

        def other(kind: str, found: Mapping[str, Any]) -> Format:
            if kind == "object" and depth < MAX_NESTED and is_plain_object(found, KEY):
                return {"type": "tag", "begin": "{", "content": self._members(found, root, depth + 1), "end": "}"}
            if kind == "array" and depth < MAX_NESTED and is_plain_array(found):
                items = repeated(self._value(found.get("items", {}), root, depth + 1), ",")
                return {"type": "tag", "begin": "[", "content": items, "end": "]"}
            return const_string("null") if kind == "null" else json_format(found, root)

        return choice([content for _, content in typed_formats(schema, root, string, other)])


class _GemmaCallParser(ToolCallParser):
    """Converts arguments to JSON while they are generated. Numbers and constants are converted when complete; a text
    without quotes that is neither is converted to a string."""

    def __init__(self, form: GemmaFormat, schemas: Schemas) -> None:
        super().__init__(form)
        self._quote = form.quote
        self._schemas = schemas
        self._stack: list[str] = []
        """Opening brackets of the objects and arrays that are open."""
        self._is_first = True
        """True if the current object or array has no member yet."""
        self._types: Types = None
        """Types of the current argument; None within nested values."""
        self._key = ""
        """Beginning of the arguments' JSON that belongs to a value that may be left out: separator and name."""

    def _read_start(self, last: bool) -> bool:
        if match := HEAD.match(self._held):
            self._held = self._held[match.end() :]
            self._start_call(match[1], "{")
            self._stack, self._is_first, self._step = ["{"], True, self._read_member
            return True
        return self._wait_for_head(last) if HEAD_SO_FAR.fullmatch(self._held) else self._reject()

    def _append(self, text: str) -> None:
        self.calls[-1].arguments += text

    def _interrupted(self) -> bool:
        """End the call at an end marker within it."""
        return any(self._held.startswith(marker) for marker in (*self._end_markers, *self._start_markers))

    def _read_member(self, last: bool) -> bool:
        """Read the name of an object's member, the beginning of an array's item, or the end of either."""
        self._held = self._held.lstrip(" \n\t\r,")
        if not self._held:
            return False
        if self._held[0] in "}]" or self._interrupted():
            return self._close()
        separator = "" if self._is_first else ", "
        if self._stack[-1] == "[":
            self._key, self._types, self._step = separator, None, self._read_value
            return True
        name = self._read_name(last)
        if name is None:
            return False
        self._key = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
        self._types = None
        if len(self._stack) == 1:
            schema = self._schemas.get(self.calls[-1].name, {})
            properties = schema.get("properties")
            self._types = types_of(properties.get(name) if isinstance(properties, Mapping) else None, schema)
        self._step = self._read_value
        return True

    def _read_name(self, last: bool) -> str | None:
        """Read a member's name and the colon after it. Returns None if more text is needed."""
        if self._held.startswith((self._quote, '"')):
            quote = self._quote if self._held.startswith(self._quote) else '"'
            end = self._held.find(quote, len(quote)) if quote != '"' else json_string_end(self._held) - 1
            rest = self._held[end + len(quote) :].lstrip()
            if end < 0 or not rest:
                return None
            written, self._held = self._held[len(quote) : end], rest.removeprefix(":")
            return json_text(written) if quote == '"' else written
        if self._quote.startswith(self._held) and not last:
            return None
        at = self._held.find(":")
        if at < 0 and len(self._held) <= MAX_KEY_LENGTH:
            return None
        name, self._held = self._held[: max(at, 0)].strip(), self._held[at + 1 :]
        return name

    def _read_value(self, last: bool) -> bool:
        """Read the beginning of a value."""
        self._held = self._held.lstrip()
        if not self._held or (not last and self._quote.startswith(self._held)):
            return False
        if self._held.startswith(self._quote):
            self._held = self._held[len(self._quote) :]
            self._begin_value('"')
            self._step = self._read_string
            return True
        first = self._held[0]
        if first in CLOSES:
            self._held = self._held[1:]
            self._begin_value(first)
            self._stack.append(first)
            self._is_first, self._step = True, self._read_member
            return True
        self._step = self._read_json_string if first == '"' else self._read_bare
        return True

    def _begin_value(self, text: str) -> None:
        self._append(self._key + text)
        self._is_first = False

    def _read_string(self, last: bool) -> bool:
        split = split_at_marker(self._held, [self._quote], last, space="")
        chunk, self._held = split.before, split.rest
        if last and not split.marker:  # drop a truncated quote
            chunk = chunk[: len(chunk) - partial_match_length(chunk, self._quote)]
        self._append(json.dumps(chunk, ensure_ascii=False)[1:-1])
        if split.marker is None:
            return False
        self._append('"')
        self._step = self._read_member
        return True

    def _read_json_string(self, last: bool) -> bool:
        """Read a string in JSON's quotes."""
        end = json_string_end(self._held)
        if not end:
            return False
        written, self._held = self._held[:end], self._held[end:]
        self._begin_value(json.dumps(json_text(written[1:-1]), ensure_ascii=False))
        self._step = self._read_member
        return True

    def _read_bare(self, last: bool) -> bool:
        """Read a number, a constant, or a text without quotes."""
        ends = [at for char in ",}]" if (at := self._held.find(char)) >= 0]
        if not ends:
            return False
        written, self._held = self._held[: min(ends)].strip(), self._held[min(ends) :]
        if (value := typed_value(written, self._types)) is not None:
            self._begin_value(value)
        self._step = self._read_member
        return True

    def _close(self) -> bool:
        """Close the innermost object or array; all of them at an end marker."""
        interrupted = self._held[0] not in "}]"
        if not interrupted:
            self._held = self._held[1:]
        for _ in range(len(self._stack) if interrupted else 1):
            self._append(CLOSES[self._stack.pop()])
        self._is_first = False
        if not self._stack:
            self._step = self._read_end
        return True


def json_string_end(text: str) -> int:
    """Position after the JSON string at the beginning of a text; 0 if the string is incomplete."""
    escaped = False
    for at in range(1, len(text)):
        if text[at] == '"' and not escaped:
            return at + 1
        escaped = text[at] == "\\" and not escaped
    return 0
