"""Structural tag formats for calls whose arguments are separate elements instead of one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError

from .values import MAX_REFERENCES, STRING, resolved, to_json, types_of

OBJECT_KEYWORDS = frozenset(
    "type properties required additionalProperties $defs definitions $schema $id $comment title description examples "
    "default deprecated strict x-guidance".split()
)
"""Supported keywords of an arguments schema, and keywords without effect on validation."""
KEY = re.compile(r"[^\s<>\"'=()]{1,128}")
"""Default pattern of parameter names."""

Format = dict[str, Any]
"""A structural tag format."""


def arguments_sequence(
    schema: Mapping[str, Any],
    elements: Mapping[str, Format],
    separator: str = "",
    key: re.Pattern[str] = KEY,
    any_order: bool = False,
) -> Format:
    """Return the format of a sequence of arguments. Arguments that the schema does not require are optional.

    Without ``any_order``, arguments are in the order of the schema's properties; with a separator, required arguments
    are first.

    Args:
        schema: schema of the arguments object.
        elements: argument name → format.
        separator: text between two arguments.
        key: pattern of the parameter names that the parser can read.

    Raises ``PenstockError`` (``unsupported``) for other schema keywords or parameter names.
    """
    if other := sorted(schema.keys() - OBJECT_KEYWORDS):
        raise _unsupported(f"{other[0]} of a tool's parameters")
    required = [name for name in schema.get("required", ()) if isinstance(name, str)]
    if unknown := [name for name in required if name not in elements]:
        raise _unsupported(f"required parameter {unknown[0]!r:.50}, which is missing from the properties,")
    if wrong := [name for name in elements if not key.fullmatch(name)]:
        raise _unsupported(f"the name of the parameter {wrong[0]!r:.50}")
    if any_order and len(elements) > 1:
        return {
            "type": "any_order",
            "elements": list(elements.values()),
            "required": [name in required for name in elements],
            "separator": separator,
        }
    if separator:
        first, others = (
            [element for name, element in elements.items() if (name in required) == wanted] for wanted in (True, False)
        )
        return _joined(first, others, separator)
    return _sequence([part if name in required else _optional(part) for name, part in elements.items()])


def _joined(required: list[Format], others: list[Format], separator: str) -> Format:
    """Required elements, then optional elements, with a separator between the elements that are present."""

    def following(elements: list[Format]) -> list[Format]:
        return [_optional(_sequence([_text(separator), element])) for element in elements]

    if required:
        between = [_text(separator)] * (2 * len(required) - 1)
        between[::2] = required
        return _sequence([*between, *following(others)])
    if not others:
        return _text("")
    return _optional(_or([_sequence([first, *following(others[i + 1 :])]) for i, first in enumerate(others)]))


def json_object_in_any_order(schema: Mapping[str, Any]) -> Format | None:
    """Return the format of a JSON object with the listed properties in any order; None if the schema has other
    constraints on the object."""
    properties, required = schema.get("properties") or {}, set(schema.get("required", ()))
    is_plain = not schema.keys() - OBJECT_KEYWORDS and not schema.keys() & {"$defs", "definitions"}
    if not is_plain or isinstance(schema.get("additionalProperties"), dict) or not required <= properties.keys():
        return None
    elements = {
        name: _sequence([_text(f"{to_json(name)}: "), json_format(part, {})]) for name, part in properties.items()
    }
    if len(elements) < 2:
        return None
    arguments = arguments_sequence(schema, elements, ", ", re.compile(".*", re.DOTALL), any_order=True)
    return _sequence([_text("{"), arguments, _text("}")])


def value_format(schema: Any, root: Mapping[str, Any], end: str, depth: int = 0) -> Format:
    """Return the format of a value: an unquoted string if the schema allows strings, otherwise JSON.

    Args:
        schema: schema of the value.
        root: enclosing schema with ``$defs`` and ``definitions``.
        end: text after the value; the value cannot contain it.

    Raises ``PenstockError`` (``unsupported``) for a constant that contains ``end``.
    """
    found = resolved(schema, root)
    types = types_of(found, root)
    if types is None or "string" not in types:
        return json_format(schema, root)
    if "const" in found or isinstance(found.get("enum"), list):
        values = found.get("enum", [found.get("const")])
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if wrong := [text for text in texts if end in text]:
            raise _unsupported(f"the value {wrong[0]!r:.50}, which contains {end}")
        return _or([_text(text) for text in texts])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(found.get(keyword), list) and depth < MAX_REFERENCES:
            return _or([value_format(part, root, end, depth + 1) for part in found[keyword]])
    string = _string(found, text_without(end))
    others = sorted(types - STRING)
    return _or([string, json_format({**found, "type": others}, root)]) if others else string


def json_format(schema: Any, root: Mapping[str, Any]) -> Format:
    """Return the format of a JSON value. ``root`` is the enclosing schema with ``$defs`` and ``definitions``."""
    if isinstance(schema, Mapping):
        schema = {name: root[name] for name in ("$defs", "definitions") if name in root} | dict(schema)
    return {"type": "json_schema", "json_schema": schema, "separators": [", ", ": "]}


def _string(schema: Mapping[str, Any], text: Format) -> Format:
    """A string with the constraints of the schema. ``format`` is ignored: JSON Schema treats it as an annotation."""
    if (pattern := schema.get("pattern")) is not None:
        begin, end = "" if pattern.startswith("^") else "[^<]*", "" if pattern.endswith("$") else "[^<]*"
        return {"type": "regex", "pattern": f"{begin}({pattern.removeprefix('^').removesuffix('$')}){end}"}
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if not shortest and longest is None:
        return text
    return {"type": "regex", "pattern": f"[^<]{{{shortest},{'' if longest is None else longest}}}"}


def text_without(end: str) -> Format:
    """Return a regular expression for any text without ``end``.

    The first character of ``end`` must occur in ``end`` only once, so that a match can only restart at that character.
    """
    first, *rest = map(re.escape, end)
    again, other, partial = first, f"[^{first}{rest[-1]}]", ""
    for i in range(len(rest) - 2, -1, -1):
        again = f"{first}|{rest[i]}({again})"
        other = f"[^{first}{rest[i]}]|{rest[i]}({other})"
        partial = f"({rest[i]}{partial})?"
    return {"type": "regex", "pattern": f"([^{first}]|{first}({again})*({other}))*({first}({again})*{partial})?"}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements} if elements else _text("")


def _or(elements: list[Format]) -> Format:
    return {"type": "or", "elements": elements}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _unsupported(feature: str) -> PenstockError:
    message = f"tools: {feature} is not supported for forced calls in the tool call format of this model"
    return PenstockError(Code.UNSUPPORTED, message, "tools")
