"""Tool calls in Python syntax: ``[get_weather(city="Paris", days=3)]``."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .forced_values import arguments_sequence, json_format
from .format import Schemas, ToolCallFormat, ToolCallParser, UnmarkedCalls, text_except
from .values import literal

NAME = r"[\w.:/-]{1,128}"
"""Pattern of a tool name: all names allowed in requests (``TOOL_NAME``), not only Python identifiers."""
KEY_NAME = r"[^\s<>\"'=(),\[\]{}]{1,128}"
SPACE = r"\s{0,64}"
CALL = re.compile(rf"{SPACE}({NAME})\({SPACE}(?=\)|{KEY_NAME}{SPACE}=[^=])", re.ASCII)
"""Pattern of a call up to its first argument."""
CALL_SO_FAR = re.compile(rf"{SPACE}({NAME}(\({SPACE}({KEY_NAME}({SPACE}=?)?)?)?)?", re.ASCII)
"""Pattern of a text that may become a match of ``CALL``."""
KEY = re.compile(rf"{SPACE}({KEY_NAME}){SPACE}=\s*", re.ASCII)
KEY_SO_FAR = re.compile(rf"{SPACE}({KEY_NAME}{SPACE})?", re.ASCII)
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


NAME_CHARACTERS = string.ascii_letters + string.digits + "_.:/-"


def _name_character(excluded: str) -> str:
    return f"[{re.escape(''.join(char for char in NAME_CHARACTERS if char not in excluded))}]"


def unmarked_lists(names: Sequence[str]) -> UnmarkedCalls:
    """Patterns of calls that are lists in Python syntax."""
    one, space, key = _name_character(""), r"[ \n\r\t\f\v]", r"[^ \n\r\t\f\v<>\"'=(),\[\]{}]"
    unknown = rf"\[{space}*" + text_except(names, _name_character, rf"\({space}*")
    no_calls = (
        rf"\[{space}*([^ \n\r\t\f\v{one[1:-1]}]|{one}+[^({one[1:-1]}])",
        rf"{unknown}([<>\"'=(,\[\]{{}}]|{key}+{space}*([<>\"'(),\[\]{{}}]|==)|{key}+{space}+{key})",
    )
    return UnmarkedCalls(
        start="[",
        heads={name: rf"\[{space}*{re.escape(name)}\(" for name in names},
        escape=f"({'|'.join(no_calls)})",
        unknown=rf"{unknown}(\)|{key}+{space}*=[^=])",
    )


@dataclass(frozen=True, kw_only=True)
class PythonicFormat(ToolCallFormat):
    """Python calls with keyword arguments, in a list or one per line. Values are Python or JSON literals."""

    in_list: bool = True
    """True if the calls are in brackets."""

    def unmarked_calls(self, names: Sequence[str]) -> UnmarkedCalls | None:
        return unmarked_lists(names) if self.allow_unmarked else None

    def any_arguments_format(self) -> dict[str, Any]:
        argument = [
            {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,127}="},
            json_format({}, {}),
        ]
        one = {"type": "sequence", "elements": argument}
        more = {"type": "sequence", "elements": [{"type": "const_string", "value": ", "}, one]}
        elements = [one, {"type": "star", "content": more}]
        return {"type": "optional", "content": {"type": "sequence", "elements": elements}}

    def parser(self, schemas: Schemas) -> ToolCallParser:
        return _PythonicCallParser(self)

    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return self._arguments(schema, any_order=False)

    def unordered_arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return self._arguments(schema, any_order=True)

    def _arguments(self, schema: Mapping[str, Any], any_order: bool) -> dict[str, Any]:
        elements = {
            name: {"type": "tag", "begin": f"{name}=", "content": json_format(part, schema), "end": ""}
            for name, part in schema.get("properties", {}).items()
        }
        return arguments_sequence(schema, elements, ", ", re.compile(KEY_NAME), any_order)


class _PythonicCallParser(ToolCallParser):
    """Streams arguments as JSON, each when it is complete. A value that is not a literal is converted to a string."""

    def __init__(self, form: PythonicFormat) -> None:
        super().__init__(form)
        self._form = form
        self._in_list = False
        """True if the calls are in brackets."""
        self._open = False
        """True if another call may follow."""
        self._key = self._quote = ""
        self._escaped = False
        self._depth = self._scanned = 0
        """Number of open brackets in the value, and number of scanned characters."""

    def _read_start(self, last: bool) -> bool:
        """Read up to the first argument, or to the end of a call without arguments."""
        ahead = self._held.lstrip()
        if not ahead:
            return self._wait_for_head(last)
        self._in_list = ahead.startswith("[")
        if (self._form.in_list and not self._in_list) or self._is_escaped(ahead):
            return self._reject()
        ahead, self._open = ahead[self._in_list :], True
        if self._read_call(ahead):
            return True
        return self._wait_for_head(last) if CALL_SO_FAR.fullmatch(ahead) else self._reject()

    def _read_call(self, ahead: str) -> bool:
        """Begin a call if the text begins with one."""
        if (match := CALL.match(ahead)) is None:
            return False
        self._start_call(match[1], "{")
        self._held, self._step = ahead[match.end() :], self._read_key
        return True

    def _read_key(self, last: bool) -> bool:
        """Read an argument's name, or the end of the call."""
        if match := KEY.match(self._held):
            rest = self._held[match.end() :]
            if not rest and not last:  # the next chunk may begin with whitespace
                return False
            self._key, self._held = match[1], rest
            self._quote, self._escaped, self._depth, self._scanned, self._step = "", False, 0, 0, self._read_value
            return True
        if KEY_SO_FAR.fullmatch(self._held):
            return False
        self._held = self._held.lstrip().removeprefix(")")
        return self._end_call()

    def _read_value(self, last: bool) -> bool:
        for at in range(self._scanned, len(self._held)):
            char = self._held[at]
            if self._quote:
                if char == self._quote and not self._escaped:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in "\"'":
                self._quote, self._escaped = char, False
            elif char in ",)" and not self._depth:
                return self._end_value(at)
            else:
                self._depth = max(self._depth + BRACKETS.get(char, 0), 0)
        self._scanned = len(self._held)
        return False

    def _end_value(self, at: int) -> bool:
        written, end, self._held = self._held[:at].strip(), self._held[at], self._held[at + 1 :]
        value = literal(written)
        call = self.calls[-1]
        call.arguments += ", " * (call.arguments != "{") + json.dumps(self._key) + ": "
        call.arguments += value.json if value else json.dumps(written, ensure_ascii=False)
        if end == ")":
            return self._end_call()
        self._step = self._read_key
        return True

    def _end_call(self) -> bool:
        self.calls[-1].arguments += "}"
        self._step = self._read_end
        return True

    def _read_end(self, last: bool) -> bool:
        """Read the text after a call: another call, or the end of the list."""
        self._held = self._held.lstrip()
        if self._open and self._held:
            if self._in_list and self._held.startswith(("]", ",")):
                self._open, self._held = self._held[0] == ",", self._held[1:]
                return True
            if self._read_call(self._held):
                return True
            if CALL_SO_FAR.fullmatch(self._held):
                return self._wait_for_end(last)
            self._open = False
        return super()._read_end(last)
