"""Structural tag formats for calls whose arguments are separate elements instead of one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.core import Code, PenstockError

from .values import MAX_REFERENCES, STRING, resolved, to_json, type_name, types_of

OBJECT_KEYWORDS = frozenset(
    "type properties required additionalProperties $defs definitions $schema $id $comment title description examples "
    "default deprecated strict x-guidance".split()
)
"""Supported keywords of an arguments schema, and keywords without effect on validation."""
ANNOTATIONS = frozenset("title description examples default deprecated $comment".split())
"""Keywords that do not restrict a value."""
STRING_KEYWORDS = ANNOTATIONS | {"pattern", "minLength", "maxLength", "format"}
"""Keywords that a string without quotes can follow."""
ARRAY_KEYWORDS = ANNOTATIONS | {"type", "items", "$defs", "definitions"}
ANY_TYPE = frozenset("string number boolean null object array".split())
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
    return sequence([part if name in required else _optional(part) for name, part in elements.items()])


def _joined(required: list[Format], others: list[Format], separator: str) -> Format:
    """Required elements, then optional elements, with a separator between the elements that are present."""

    def following(elements: list[Format]) -> list[Format]:
        return [_optional(sequence([const_string(separator), element])) for element in elements]

    if required:
        between = [const_string(separator)] * (2 * len(required) - 1)
        between[::2] = required
        return sequence([*between, *following(others)])
    if not others:
        return const_string("")
    return _optional(_or([sequence([first, *following(others[i + 1 :])]) for i, first in enumerate(others)]))


def json_object_in_any_order(schema: Mapping[str, Any]) -> Format | None:
    """Return the format of a JSON object with the listed properties in any order; None if the schema has other
    constraints on the object."""
    properties, required = schema.get("properties") or {}, set(schema.get("required", ()))
    is_plain = not schema.keys() - OBJECT_KEYWORDS and not schema.keys() & {"$defs", "definitions"}
    if not is_plain or isinstance(schema.get("additionalProperties"), dict) or not required <= properties.keys():
        return None
    elements = {
        name: sequence([const_string(f"{to_json(name)}: "), json_format(part, {})]) for name, part in properties.items()
    }
    if len(elements) < 2:
        return None
    arguments = arguments_sequence(schema, elements, ", ", re.compile(".*", re.DOTALL), any_order=True)
    return sequence([const_string("{"), arguments, const_string("}")])


def value_format(schema: Any, root: Mapping[str, Any], end: str, depth: int = 0) -> Format:
    """Return the format of a value: an unquoted string if the schema allows strings, otherwise JSON.

    Args:
        schema: schema of the value.
        root: enclosing schema with ``$defs`` and ``definitions``.
        end: text after the value; the value cannot contain it.

    Raises ``PenstockError`` (``unsupported``) for a constant that contains ``end``.
    """
    if _is_unknown(schema, root):
        return json_format(schema, root)
    found = resolved(schema, root)
    types = types_of(found, root)
    if types is None:  # the parser keeps the quotes of a JSON string
        rest = json_format({**found, "type": sorted(ANY_TYPE - STRING)}, root)
        return _or([_string(found, text_without(end)), rest]) if found.keys() <= STRING_KEYWORDS else rest
    if "string" not in types:
        return json_format(schema, root)
    if "const" in found or isinstance(found.get("enum"), list):
        values = found.get("enum", [found.get("const")])
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if wrong := [text for text in texts if end in text]:
            raise _unsupported(f"the value {wrong[0]!r:.50}, which contains {end}")
        return _or([const_string(text) for text in texts])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(found.get(keyword), list) and depth < MAX_REFERENCES:
            return _or([value_format(part, root, end, depth + 1) for part in found[keyword]])
    string = _string(found, text_without(end))
    others = sorted(types - STRING)
    return _or([string, json_format({**found, "type": others}, root)]) if others else string


def typed_formats(
    schema: Any,
    root: Mapping[str, Any],
    string: Callable[[Mapping[str, Any]], Format],
    other: Callable[[str, Mapping[str, Any]], Format],
    depth: int = 0,
) -> list[tuple[str, Format]]:
    """Return the alternative formats of a value, each with its JSON type, for call formats that write types apart.

    Args:
        schema: schema of the value.
        root: enclosing schema with ``$defs`` and ``definitions``.
        string: format of a string with a given schema.
        other: format of a value of a given JSON type that is no string, with a given schema.
    """
    if _is_unknown(schema, root):
        return [("", json_format(schema, root))]
    found = resolved(schema, root)
    if "const" in found or isinstance(found.get("enum"), list):
        values = found.get("enum", [found.get("const")])
        return [
            (kind, string({"const": value}) if kind == "string" else other(kind, {"const": value}))
            for kind, value in ((type_name(value), value) for value in values)
        ]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(found.get(keyword), list) and depth < MAX_REFERENCES:
            parts = [typed_formats(part, root, string, other, depth + 1) for part in found[keyword]]
            return [alternative for part in parts for alternative in part]
    types = types_of(found, root)
    if types is None:
        types = ANY_TYPE if found.keys() <= STRING_KEYWORDS else ANY_TYPE - STRING
    if "number" in types:
        types -= {"integer"}
    return [
        (kind, string(found) if kind == "string" else other(kind, {**found, "type": kind})) for kind in sorted(types)
    ]


def string_format(schema: Mapping[str, Any], end: str) -> Format:
    """Return the format of an unquoted string, which cannot contain ``end``.

    Raises ``PenstockError`` (``unsupported``) for a constant that contains ``end``.
    """
    if "const" not in schema:
        return _string(schema, text_without(end))
    if end in schema["const"]:
        raise _unsupported(f"the value {schema['const']!r:.50}, which contains {end}")
    return const_string(schema["const"])


def is_plain_object(schema: Mapping[str, Any], key: re.Pattern[str]) -> bool:
    """Check whether ``arguments_sequence`` can write an object with this schema, which lists its properties."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not properties or schema.keys() - OBJECT_KEYWORDS:
        return False
    return all(map(key.fullmatch, properties)) and isinstance(required, list) and set(required) <= properties.keys()


def is_plain_array(schema: Mapping[str, Any]) -> bool:
    """Check whether a schema restricts only the items of an array."""
    return isinstance(schema.get("items"), Mapping) and schema.keys() <= ARRAY_KEYWORDS


def repeated(content: Format, separator: str = "") -> Format:
    """Return the format of zero or more repetitions."""
    tag = {"type": "tag", "begin": "", "content": content, "end": ""}
    return {"type": "tags_with_separator", "tags": [tag], "separator": separator}


def choice(formats: list[Format]) -> Format:
    """Return the format of one of several formats."""
    return formats[0] if len(formats) == 1 else _or(formats)


def const_string(value: str) -> Format:
    """Return the format of a fixed text."""
    return {"type": "const_string", "value": value}


def json_format(schema: Any, root: Mapping[str, Any]) -> Format:
    """Return the format of a JSON value. ``root`` is the enclosing schema with ``$defs`` and ``definitions``."""
    if isinstance(schema, Mapping):
        schema = {name: root[name] for name in ("$defs", "definitions") if name in root} | dict(schema)
    return {"type": "json_schema", "json_schema": schema, "separators": [", ", ": "]}


def _is_unknown(schema: Any, root: Mapping[str, Any]) -> bool:
    """True for a schema that allows no value, and for a reference that does not exist: the engine reports both."""
    return schema is False or (isinstance(schema, Mapping) and "$ref" in schema and not resolved(schema, root))


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


def sequence(elements: list[Format]) -> Format:
    """Return the format of several formats in a fixed order."""
    return {"type": "sequence", "elements": elements} if elements else const_string("")


def _or(elements: list[Format]) -> Format:
    return {"type": "or", "elements": elements}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def _unsupported(feature: str) -> PenstockError:
    message = f"tools: {feature} is not supported for forced calls in the tool call format of this model"
    return PenstockError(Code.UNSUPPORTED, message, "tools")
