"""Tool calls whose arguments are XML-like elements: ``<parameter=city>Paris</parameter>``."""

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
    json_format,
    sequence,
    string_format,
    text_without,
    typed_formats,
    value_format,
)
from .format import Schemas, ToolCallFormat, ToolCallParser
from .values import STRING, Types, typed_value, types_of

NAME = re.compile(r"[^\s<>\"'=]{1,256}")
MAX_KEY_LENGTH = 512
MAX_KIND_LENGTH = 64
"""Maximum number of characters between a parameter's name and its value."""
CDATA_START, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, kw_only=True)
class XMLFormat(ToolCallFormat):
    """Calls with XML-like elements. Strings are written without quotes, other values as JSON; the type of ``5`` depends
    on the tool's schema."""

    name_start: str = ""
    """Text between a start marker and the name. The same text also begins further calls after that start marker."""
    name_lead: str = ""
    """Optional text between a start marker and ``name_start``."""
    name_end: str = ""
    """Text after the name; if empty, the first parameter or the end of the call follows."""
    parameter: tuple[str, str]
    """Text before and after a parameter's name."""
    kinds: tuple[tuple[str, str], ...] = ()
    """JSON type and text between a parameter's name and its value, for formats that write the type of each value. The
    last text is that of all other types."""
    kind_end: str = ""
    """Last characters of the texts of ``kinds``."""
    escaped_keys: bool = False
    """True if parameter names have the escapes of XML attributes."""
    value_start: str = ""
    """Text before a value, after optional whitespace."""
    value_end: str
    """Text after a value."""
    value_stop: str = ""
    """Text that a forced string cannot contain; empty: ``value_end``."""
    cdata: bool = False
    """True if a value may be in ``<![CDATA[…]]>``."""
    close: str
    """Text that ends a call."""
    trim_newlines: bool = False
    """True if one line break before and one line break after a value are not part of the value."""
    line: str = "\n"
    """Text between two elements of a forced call."""

    def any_arguments_format(self) -> Format:
        begin, key_end = self.parameter
        before = f"{self.line}{self.value_start}" if self.value_start else ""
        around = "\n" if self.trim_newlines else ""
        text = text_without(self.value_stop or self.value_end)
        value = sequence([const_string(f"{before}{around}"), text])
        if self.kinds:
            other = sequence([const_string(self._kind_text("number")), json_format({"type": "number"}, {})])
            value = choice([sequence([const_string(self._kind_text("string")), text]), other])
        key: Format = {"type": "regex", "pattern": "[^\\s<>\"'=()&]{1,128}"}
        end = const_string(f"{around}{self.value_end}{self.line}")
        argument = sequence([const_string(begin), key, const_string(key_end), value, end])
        return {"type": "star", "content": argument}

    def parser(self, schemas: Schemas) -> ToolCallParser:
        return _XMLCallParser(self, schemas)

    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return self._arguments(schema, any_order=False)

    def unordered_arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return self._arguments(schema, any_order=True)

    def _arguments(self, schema: Mapping[str, Any], any_order: bool) -> dict[str, Any]:
        begin, key_end = self.parameter
        before = f"{self.line}{self.value_start}" if self.value_start else ""
        around = "\n" if self.trim_newlines else ""
        elements = {}
        stop = self.value_stop or self.value_end
        for name, part in schema.get("properties", {}).items():
            key = _escape(name) if self.escaped_keys else name
            element: Format = {"type": "tag", "end": f"{around}{self.value_end}{self.line}"}
            if not self.kinds:
                begin_value = f"{begin}{key}{key_end}{before}{around}"
                elements[name] = element | {"begin": begin_value, "content": value_format(part, schema, stop)}
                continue
            values = typed_formats(
                part,
                schema,
                lambda found: string_format(found, stop),
                lambda _, found, root=schema: json_format(found, root),  # type: ignore[misc]
            )
            alternatives = [
                element | {"begin": f"{begin}{key}{key_end}{self._kind_text(kind)}", "content": value}
                for kind, value in values
            ]
            elements[name] = {"type": "or", "elements": alternatives}
        return arguments_sequence(schema, elements, any_order=any_order)

    def _kind_text(self, kind: str) -> str:
        """Text of a JSON type."""
        texts = dict(self.kinds)
        return texts.get("number" if kind == "integer" else kind, self.kinds[-1][1])

    def writes_string(self, text: str) -> bool:
        """Check whether the text between a parameter's name and its value is that of a string."""
        return text.split() == self._kind_text("string").split()


class _XMLCallParser(ToolCallParser):
    """Streams arguments as JSON: strings as they are generated, other values when complete."""

    def __init__(self, form: XMLFormat, schemas: Schemas) -> None:
        super().__init__(form, (form.name_start,) if form.name_start else ())
        self._form = form
        self._schemas = schemas
        markers = (form.parameter[0], form.close, form.name_start, *form.start_markers, *form.end_markers)
        self._markers = [*dict.fromkeys(marker for marker in markers if marker)]
        """Markers that may follow within a call."""
        self._key = self._value = self._value_end = ""
        """Name, text and end of the current value."""
        self._types: Types = None
        self._is_text = self._trim = False

    def _read_start(self, last: bool) -> bool:
        """Read from the start marker to the end of the name."""
        form, ahead = self._form, self._held.lstrip()
        if self._marker != form.name_start:
            if form.name_lead and ahead.startswith(form.name_lead):
                ahead = ahead[len(form.name_lead) :].lstrip()
            elif form.name_lead.startswith(ahead):
                return self._wait_for_head(last)
            if not ahead.startswith(form.name_start):
                return self._wait(ahead, last, form.name_start)
            ahead = ahead[len(form.name_start) :].lstrip()
        match = NAME.match(ahead)
        rest = ahead[match.end() :] if match else ""
        if not match or not rest:
            begun = len(ahead) <= 256 and (match or not ahead)
            return self._wait_for_head(last) if begun else self._reject()
        ends = [form.name_end] if form.name_end else [form.parameter[0], form.close]
        rest = rest if form.name_end else rest.lstrip()
        if not any(rest.startswith(end) for end in ends):
            return self._wait(rest, last, *ends)
        self._held = rest[len(form.name_end) :]
        self._start_call(match[0], "{")
        self._step = self._read_parameters
        return True

    def _wait(self, ahead: str, last: bool, *texts: str) -> bool:
        """Wait for more text if ``ahead`` is a prefix of one of ``texts``; otherwise reject the call."""
        return self._wait_for_head(last) if any(text.startswith(ahead) for text in texts) else self._reject()

    def _read_parameters(self, last: bool) -> bool:
        """Read the text between parameters; unknown text is ignored."""
        split = split_at_marker(self._held, self._markers, last)
        self._held = split.rest
        if split.marker is None:
            return False
        if split.marker == self._form.parameter[0]:
            self._step = self._read_key
            return True
        if split.marker != self._form.close:
            self._held = split.marker + self._held
        self.calls[-1].arguments += "}"
        self._step = self._read_end
        return True

    def _read_key(self, last: bool) -> bool:
        form = self._form
        split = split_at_marker(self._held, form.parameter[1:], last, space="")
        if "<" in split.before or len(split.before) > MAX_KEY_LENGTH or (last and not split.marker):
            return self._give_up_key()
        if not split.marker:
            return False
        key, rest, writes_string = split.before, split.rest.lstrip() if form.value_start else split.rest, False
        if form.kinds:
            at = rest.find(form.kind_end, 0, MAX_KIND_LENGTH)
            if at < 0:
                return self._give_up_key() if last or len(rest) > MAX_KIND_LENGTH else False
            at += len(form.kind_end)
            writes_string, rest = form.writes_string(rest[:at]), rest[at:]
        if not rest.startswith(form.value_start):
            return False if not last and form.value_start.startswith(rest) else self._give_up_key()
        key = _unescape(key) if form.escaped_keys else key
        self._held, self._key, self._value = rest[len(form.value_start) :], key.strip(), ""
        self._trim, self._value_end = form.trim_newlines, "" if form.cdata else form.value_end
        call = self.calls[-1]
        schema = self._schemas.get(call.name, {})
        properties = schema.get("properties")
        self._types = types_of(properties.get(self._key) if isinstance(properties, Mapping) else None, schema)
        if writes_string and (self._types is None or "string" in self._types):
            self._types = STRING
        self._is_text = self._types == STRING
        if self._is_text:
            self._add_key()
            call.arguments += '"'
        self._step = self._read_value
        return True

    def _add_key(self) -> None:
        call = self.calls[-1]
        call.arguments += ", " * (call.arguments != "{") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _give_up_key(self) -> bool:
        self._step = self._read_parameters
        return True

    def _read_value(self, last: bool) -> bool:
        if self._trim:
            if not self._held and not last:
                return False
            self._held, self._trim = self._held.removeprefix("\n"), False
        if not self._value_end and not self._read_cdata_start(last):
            return False
        split = split_at_marker(self._held, [self._value_end], last, space="")
        chunk, self._held = split.before, split.rest
        if last and not split.marker:  # drop a truncated end marker
            chunk = chunk[: len(chunk) - partial_match_length(chunk, self._value_end)]
        if self._form.trim_newlines:
            if split.marker:
                chunk = chunk.removesuffix("\n")
            elif chunk.endswith("\n"):  # this line break may precede the end marker
                chunk, self._held = chunk[:-1], "\n" + self._held
        call = self.calls[-1]
        if self._is_text:
            call.arguments += json.dumps(chunk, ensure_ascii=False)[1:-1]
        else:
            self._value += chunk
        if split.marker is None:
            return False
        if self._is_text:
            call.arguments += '"'
        elif (value := typed_value(self._value, self._types)) is not None:
            self._add_key()
            call.arguments += value
        self._step = self._read_parameters
        return True

    def _read_cdata_start(self, last: bool) -> bool:
        """Read ``<![CDATA[``, if present, and determine the end of the value. Returns False if more text is needed."""
        if len(self._held) < len(CDATA_START) and CDATA_START.startswith(self._held):
            if last:  # drop a truncated marker
                self._held = ""
            return False
        is_cdata = self._held.startswith(CDATA_START)
        self._held = self._held.removeprefix(CDATA_START)
        self._value_end = f"{CDATA_END if is_cdata else ''}{self._form.value_end}"
        return True


def _escape(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


def _unescape(name: str) -> str:
    return name.replace("&quot;", '"').replace("&amp;", "&")
