"""Tool calls whose arguments are a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .brace_scanner import BraceScanner
from .forced_values import json_object_in_any_order
from .format import Schemas, ToolCallFormat, ToolCallParser, UnmarkedCalls, text_except
from .values import is_beginning, is_text, json_text

_SPACE = r"[ \n\r\t]*"
NAME_AND_ARGUMENTS = re.compile(
    rf'\{{{_SPACE}("tool_call_id"{_SPACE}:{_SPACE}"[^"\\]{{0,64}}"{_SPACE},{_SPACE}'
    rf'|"type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?'
    rf'"(tool_)?name"{_SPACE}:{_SPACE}"(?P<name>([^"\\]|\\.){{1,256}})"{_SPACE},{_SPACE}'
    rf'"(arguments|parameters|args)"{_SPACE}:{_SPACE}(?=\{{)'
)
"""Beginning of an object with name and arguments, up to the arguments."""
NAME_AS_KEY = re.compile(r'\{\s*"(?P<name>([^"\\]|\\.){1,256})"\s*:\s*(?=\{)')
"""Beginning of an object whose only key is the name, up to the arguments, which are its value."""
HEADER_NAME = re.compile(r"[\w.:/-]{0,128}", re.ASCII)
"""Pattern of the name before ``JSONFormat.header_end``."""
MAX_NAME_LENGTH = 512
"""Maximum number of characters between a start marker and the arguments."""


_STRING = r'"([^"\\]|\\.)*"'
_BEFORE_NAME = rf'\{{{_SPACE}("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?'
_NO_STRING = r'[^ \n\r\t"]'
"""First character of a value that is no string."""


def _string_except(texts: Sequence[str]) -> str:
    """Regular expression for a JSON string, except for ``texts``."""
    return '"' + text_except(texts, lambda excluded: rf'([^"\\{re.escape(excluded)}]|\\.)', '"')


def unmarked_objects(names: Sequence[str]) -> UnmarkedCalls:
    """Patterns of calls that are objects with name and arguments."""
    colon, comma = f"{_SPACE}:{_SPACE}", f"{_SPACE},{_SPACE}"
    before_name = f'{_BEFORE_NAME}"name"{colon}'
    arguments = f'{comma}"(arguments|parameters|args)"'
    no_calls = (
        f"{_BEFORE_NAME}({_NO_STRING}|{_string_except(('name', 'type'))})",
        rf'\{{{_SPACE}"type"{_SPACE}([^ \n\r\t:]|:{_SPACE}({_NO_STRING}|{_string_except(("function",))}))',
        rf'\{{{_SPACE}"type"{colon}"function"{_SPACE}([^ \n\r\t,]|,{_SPACE}"type")',
        rf'{_BEFORE_NAME}"name"{_SPACE}([^ \n\r\t:]|:{_SPACE}({_NO_STRING}|{_STRING}{_SPACE}[^ \n\r\t,]))',
        f"{before_name}{_STRING}{comma}({_NO_STRING}|{_string_except(('arguments', 'parameters', 'args'))})",
        rf"{before_name}{_string_except(names)}{arguments}{_SPACE}([^ \n\r\t:]|:{_SPACE}[^ \n\r\t{{])",
    )
    return UnmarkedCalls(
        start="{",
        heads={name: f'{before_name}"{re.escape(name)}"{arguments}{colon}' for name in names},
        escape=f"({'|'.join(no_calls)})",
        unknown=rf"{before_name}{_string_except(names)}{arguments}{colon}\{{",
    )


@dataclass(frozen=True, kw_only=True)
class JSONFormat(ToolCallFormat):
    """Calls whose arguments are a JSON object. The name is in the same object (``{"name": …, "arguments": {…}}``) or in
    the text before the arguments."""

    lead: str = " \n\r\t"
    """Characters allowed between a start marker and the object with name and arguments."""
    name_pattern: re.Pattern[str] | None = None
    """Pattern of the text between a start marker and the arguments, if that text contains the name. Group ``id`` is the
    call id; any other group is the name. None: the name is in the object."""
    header_end: str = ""
    """Text before the object, after an optional name that is ignored; empty: there is no such header."""
    head: re.Pattern[str] = NAME_AND_ARGUMENTS
    """Pattern of the beginning of an object with the name, up to the arguments."""
    names: tuple[str, ...] = ()
    """Examples that match ``name_pattern``, one for each alternative of the pattern."""
    separators: tuple[str, ...] = ()
    """Texts after a call that begin another call without a start marker."""
    repeats: bool = False
    """True if another object after a call begins another call, without a separator."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the arguments even if braces are open: all markers that are not JSON syntax."""
        return tuple(
            text for text in (*self.start_markers, *self.end_markers, *self.separators) if text not in ("]", ",")
        )

    def parser(self, schemas: Schemas) -> ToolCallParser:
        return _JSONCallParser(self)

    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": schema, "separators": [", ", ": "]}

    def unmarked_calls(self, names: Sequence[str]) -> UnmarkedCalls | None:
        return unmarked_objects(names) if self.allow_unmarked and not self.header_end else None

    @property
    def triggers(self) -> tuple[str, ...]:
        return (self.header_end,) if self.header_end else self.start_markers

    def unordered_arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return json_object_in_any_order(schema) or self.arguments_format(schema)

    def any_arguments_format(self) -> dict[str, Any]:
        return self.arguments_format({"type": "object"})

    def may_be_name(self, text: str) -> bool:
        """Check whether a text is a prefix of ``name_pattern``: some suffix of an example completes it."""
        pattern = self.name_pattern
        ends = [whole[at:] for whole in self.names for at in range(len(whole) + 1)]
        return pattern is not None and any(pattern.fullmatch(text + end) for end in ends)

    def written_name(self, name: str) -> str:
        is_json_value = self.call_start[0].endswith('": ')
        return json.dumps(name, ensure_ascii=False) if is_json_value else name


class _JSONCallParser(ToolCallParser):
    """Streams arguments unmodified, from the opening brace to the closing brace, the next marker or the end.

    Arguments may be invalid JSON, as with OpenAI. An object that does not begin with the name is held back to its end.
    """

    def __init__(self, form: JSONFormat) -> None:
        super().__init__(form, form.separators)
        self._form = form
        self._scanner = BraceScanner(form.stops)
        self._scanned = 0
        """Number of characters scanned in an object that is held back."""
        self._in_object = False
        """True if name and arguments are in one object."""

    def _read_start(self, last: bool) -> bool:
        """Read the text between a start marker and the first brace."""
        if self._form.header_end and not self._marker.endswith(self._form.header_end):
            return self._read_header(last)
        form, ahead = self._form, self._held.lstrip(self._form.lead)
        if not ahead:
            return self._wait_for_head(last)
        if ahead.startswith("{"):
            self._scanned, self._scanner, self._step = 0, BraceScanner(form.stops), self._read_object
            return True
        at = self._held.find("{")
        if form.name_pattern is None:
            return self._reject()
        if at < 0 and len(self._held) <= MAX_NAME_LENGTH and (not last or form.may_be_name(self._held)):
            return self._wait_for_head(last)
        match = form.name_pattern.fullmatch(self._held, 0, at) if 0 <= at <= MAX_NAME_LENGTH else None
        if match is None:
            return self._reject()
        groups = match.groupdict()
        call_id = groups.pop("id", "")
        if call_id in {call.id for call in self.calls}:
            name, _, index = call_id.rpartition(":")
            call_id = f"{name}:{len(self.calls)}" if index.isdecimal() and name else ""
        self._begin(next(name for name in groups.values() if name), in_object=False, call_id=call_id)
        self._held = self._held[at:]
        return True

    def _read_header(self, last: bool) -> bool:
        """Read the name before ``header_end``, and this text."""
        end = self._form.header_end
        name, bracket, rest = self._held.partition(end[0])
        rest = bracket + rest
        if not HEADER_NAME.fullmatch(name) or not (rest.startswith(end) or end.startswith(rest)):
            return self._reject()
        if not rest.startswith(end):
            return self._wait_for_head(last) if len(rest) < 2 else self._wait_for_end(last)
        self._held, self._marker = rest[len(end) :], f"{self._marker}{name}{end}"
        return True

    def _read_object(self, last: bool) -> bool:
        """Read an object with name and arguments, up to the arguments."""
        ahead = self._held.lstrip(self._form.lead)
        if self._is_escaped(ahead):
            return self._reject()
        if head := self._form.head.match(ahead):
            self._begin(json_text(head["name"]), in_object=True)
            self._held = ahead[head.end() :]
            return True
        length, ended = self._scanner.scan(ahead[self._scanned :])
        self._scanned += length
        if not ended:
            if last and is_beginning(ahead) and (self._marker or self.calls):
                return self._wait_for_head(last)
            if last:  # an unclosed object is content; a second search for markers in it would take quadratic time
                self._add_content(self._gap + self._marker + self._held)
                self._held, self._step = "", self._read_content
            return False
        call = _call(ahead[: self._scanned]) if self._form.head is NAME_AND_ARGUMENTS else None
        if call is None:
            return self._reject()
        self._start_call(*call)
        self._held, self._step = ahead[self._scanned :], self._read_end
        return True

    def _read_arguments(self, last: bool) -> bool:
        length, ended = self._scanner.scan(self._held)
        self.calls[-1].arguments += self._held[:length]
        self._held = self._held[length:]
        if not ended:
            return False
        self._scanner = BraceScanner(self._form.stops, depth=1)
        self._step = self._skip_object_end if self._in_object else self._read_end
        return True

    def _skip_object_end(self, last: bool) -> bool:
        """Skip the fields of the object after the arguments."""
        length, ended = self._scanner.scan(self._held)
        self._held = self._held[length:]
        if ended:
            self._step = self._read_end
        return ended

    def _read_end(self, last: bool) -> bool:
        self._held = self._held.lstrip()
        if self._form.repeats and self._held.startswith("{"):
            self._gap, self._marker, self._step = "", "", self._read_start
            return True
        return super()._read_end(last)

    def _begin(self, name: str, in_object: bool, call_id: str = "") -> None:
        self._start_call(name, call_id=call_id)
        self._in_object, self._scanner, self._step = in_object, BraceScanner(self._form.stops), self._read_arguments


def _call(written: str) -> tuple[str, str] | None:
    """Name and arguments of a complete object; None if it is not a call."""
    try:
        document = json.loads(written)
        name = document["tool_name"] if "tool_name" in document else document["name"]
        arguments = document.get("arguments", document.get("parameters", document.get("args"))) or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str) and not is_text(text):
            text = json.dumps(arguments)
        valid = isinstance(name, str) and isinstance(json.loads(text), dict)  # arguments may be JSON in a string
        valid = valid and is_text(name + text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (name, text) if valid else None
