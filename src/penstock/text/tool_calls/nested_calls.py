"""Tool calls whose arguments are elements named after the parameters, nested for objects and arrays."""

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
from .values import STRING, Types, resolved, typed_value, types_of

NAME = re.compile(r"[^\s<>\"'=]{1,256}")
KEY = re.compile(r"(?!(?:invoke|tool_call)\Z)[^\s<>\"'=()/]{1,128}")
"""Pattern of the parameter names that can be written."""
ITEM = "item"
"""Name of the elements of an array."""
MAX_TAG_LENGTH = 512
MAX_NESTED = 3
"""Maximum depth of the objects and arrays that forced calls write as elements; deeper values are JSON."""


@dataclass(frozen=True, kw_only=True)
class NestedFormat(ToolCallFormat):
    """Calls like ``<city>Paris</city>``, where each tag follows the same text. Strings are written without quotes."""

    mark: str
    """Text before each tag."""
    name_start: str
    """Text between ``mark`` and the name of a call."""
    name_end: str
    """Text after the name."""
    close: str
    """Tag that ends a call."""
    string_stop: str
    """Beginning of ``mark``, which forced strings cannot contain."""

    def parser(self, schemas: Schemas) -> ToolCallParser:
        return _NestedCallParser(self, schemas)

    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return self._members(schema, schema, 0)

    def unordered_arguments_format(self, schema: Mapping[str, Any]) -> Format:
        return self._members(schema, schema, 0, any_order=True)

    def any_arguments_format(self) -> Format:
        key: Format = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,127}"}  # the end tag is not compared
        tags = [sequence([const_string(f"{self.mark}<{slash}"), key, const_string(">")]) for slash in ("", "/")]
        return {"type": "star", "content": sequence([tags[0], text_without(self.string_stop), tags[1]])}

    def _members(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int, any_order: bool = False
    ) -> Format:
        """Format of the elements of an object."""
        elements = {name: self._element(name, part, root, depth) for name, part in schema.get("properties", {}).items()}
        return arguments_sequence(schema, elements, key=KEY, any_order=any_order)

    def _element(self, name: str, schema: Any, root: Mapping[str, Any], depth: int) -> Format:
        """Format of an element."""

        def string(found: Mapping[str, Any]) -> Format:
            return string_format(found, self.string_stop)

        def other(kind: str, found: Mapping[str, Any]) -> Format:
            if kind == "object" and depth < MAX_NESTED and is_plain_object(found, KEY):
                return self._members(found, root, depth + 1)
            if kind == "array" and depth < MAX_NESTED and is_plain_array(found):
                return repeated(self._element(ITEM, found["items"], root, depth + 1))
            return const_string("null") if kind == "null" else json_format(found, root)

        content = choice([part for _, part in typed_formats(schema, root, string, other)])
        return {"type": "tag", "begin": f"{self.mark}<{name}>", "content": content, "end": f"{self.mark}</{name}>"}


@dataclass(slots=True)
class _Element:
    """An open element."""

    name: str
    schema: Any
    types: Types
    head: str
    """JSON before the value: separator and name."""
    container: str = ""
    """``{`` or ``[`` once the first child element has begun."""
    num_children: int = 0
    text: str = ""
    """Text so far, of an element that is not a string."""


class _NestedCallParser(ToolCallParser):
    """Converts arguments to JSON: strings and structure while they are generated, other values when complete."""

    def __init__(self, form: NestedFormat, schemas: Schemas) -> None:
        super().__init__(form, (form.mark + form.name_start,))
        self._form = form
        self._schemas = schemas
        self._schema: Mapping[str, Any] = {}
        """Schema of the current call's arguments."""
        self._open: list[_Element] = []
        """Open elements; the first one is the call."""

    def _read_start(self, last: bool) -> bool:
        """Read from the start marker to the end of the name."""
        form, ahead = self._form, self._held.lstrip()
        for text in (form.mark, form.name_start) if self._marker not in self._separators else ():
            if not ahead.startswith(text):
                return self._wait_for_head(last) if text.startswith(ahead) else self._reject()
            ahead = ahead[len(text) :].lstrip()
        match = NAME.match(ahead)
        rest = ahead[match.end() :] if match else ahead
        if not match or not rest.startswith(form.name_end):
            begun = form.name_end.startswith(rest) and len(ahead) <= MAX_TAG_LENGTH
            return self._wait_for_head(last) if begun else self._reject()
        self._held = rest[len(form.name_end) :]
        self._start_call(match[0])
        self._schema = self._schemas.get(match[0], {})
        self._open = [_Element("", self._schema, frozenset(("object",)), "", "{")]
        self._append("{")
        self._step = self._read_text
        return True

    def _append(self, text: str) -> None:
        self.calls[-1].arguments += text

    def _read_text(self, last: bool) -> bool:
        """Read text up to the next tag."""
        mark = self._form.mark
        split = split_at_marker(self._held, [mark], last, space="")
        chunk, self._held = split.before, split.rest
        if last and not split.marker:  # drop a truncated mark
            chunk = chunk[: len(chunk) - partial_match_length(chunk, mark)]
        if len(self._open) > 1 and not self._open[-1].container:
            self._append_text(chunk)
        if split.marker is None:
            return False
        self._step = self._read_tag
        return True

    def _read_tag(self, last: bool) -> bool:
        """Read a tag. A tag that does not fit is text."""
        ahead = self._held.lstrip()
        at = ahead.find(">", 0, MAX_TAG_LENGTH)
        if at < 0 and len(ahead) < MAX_TAG_LENGTH and (not ahead or ahead[0] == "<"):
            return False
        tag = ahead[: at + 1]
        self._step = self._read_text
        if tag == self._form.close or self._form.mark + tag in self._end_markers:
            return self._end_call(tag, ahead[at + 1 :])
        name = tag[1:-1].removeprefix("/").strip() if tag.startswith("<") else ""
        if tag.startswith("</") and any(element.name == name for element in self._open[1:]):
            self._held = ahead[at + 1 :]
            while self._open[-1].name != name:
                self._end_element()
            self._end_element()
        elif KEY.fullmatch(name) and not tag.startswith("</") and self._open[-1].types != STRING:
            self._held = ahead[at + 1 :]
            self._begin_element(name)
        elif len(self._open) > 1:  # a mark within a text
            self._held = self._form.mark[1:] + self._held
            self._append_text(self._form.mark[0])
        return True

    def _append_text(self, text: str) -> None:
        element = self._open[-1]
        if element.types == STRING:
            self._append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            element.text += text

    def _begin_element(self, name: str) -> None:
        parent = self._open[-1]
        if not parent.container:
            is_array = name == ITEM and (parent.types is None or "object" not in parent.types)
            parent.container = "[" if is_array else "{"
            self._append(parent.head + parent.container)
        schema = self._child_schema(parent, name)
        separator = ", " if parent.num_children else ""
        key = f"{json.dumps(name, ensure_ascii=False)}: " if parent.container == "{" else ""
        element = _Element(name, schema, types_of(schema, self._schema), separator + key)
        if element.types == STRING:
            self._append(f'{element.head}"')
            parent.num_children += 1
        self._open.append(element)

    def _child_schema(self, parent: _Element, name: str) -> Any:
        """Schema of a child element; None if unknown."""
        schema = resolved(parent.schema, self._schema)
        if parent.container == "[":
            return schema.get("items")
        properties = schema.get("properties")
        found = properties.get(name) if isinstance(properties, Mapping) else None
        return found if found is not None else schema.get("additionalProperties")

    def _end_element(self) -> None:
        element, parent = self._open.pop(), self._open[-1]
        if element.container:
            self._append("}" if element.container == "{" else "]")
            parent.num_children += 1
        elif element.types == STRING:
            self._append('"')
        else:
            empty = {frozenset(("array",)): "[]", frozenset(("object",)): "{}"}.get(element.types or frozenset())
            value = empty if empty and not element.text.strip() else typed_value(element.text, element.types)
            if value is not None:
                self._append(element.head + value)
                parent.num_children += 1

    def _end_call(self, tag: str, rest: str) -> bool:
        """End the call. The end marker of all calls stays for ``_read_end``."""
        while len(self._open) > 1:
            self._end_element()
        self._append("}")
        self._held = rest if tag == self._form.close else f"{self._form.mark}{tag}{rest}"
        self._step = self._read_end
        return True
