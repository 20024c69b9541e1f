"""Conversion of argument values that are not JSON, using their types in the tool's schema."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

NAMES = {"true": True, "false": False, "null": None, "none": None}
"""Constants of JSON and Python, in lower case (matched case-insensitively)."""
MAX_REFERENCES = 16
"""Maximum depth of references and nested schemas when determining a type."""
STRING = frozenset(("string",))
NUMBERS = frozenset(("integer", "number", "null"))
GROUPED = re.compile(r"-?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?")
"""Pattern of a number with digit grouping: 1,000."""
TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
"""Python type → JSON Schema type."""

CUT_VALUE = re.compile(r"-|\.|[eE][+-]?|tr?u?|fa?l?s?|nu?l?|u[0-9a-fA-F]{0,4}")
"""Pattern of the end of a truncated JSON constant, number or escape sequence."""

Types = frozenset[str] | None
"""JSON Schema types that a value may have; None if unknown."""


def is_text(text: str) -> bool:
    """Check that a text can be encoded as UTF-8, i.e. has no unpaired surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def json_text(written: str) -> str:
    """Decode the content of a JSON string. Returns invalid content unmodified."""
    try:
        text = str(json.loads(f'"{written}"', strict=False))
    except ValueError:
        return written
    return text if is_text(text) else written


def is_beginning(text: str) -> bool:
    """Check whether a text is a prefix of a JSON document."""
    try:
        json.JSONDecoder(strict=False).raw_decode(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].rstrip()
        return not rest or "Unterminated" in error.msg or CUT_VALUE.fullmatch(rest) is not None
    except RecursionError:
        return False
    return True


def to_json(value: Any) -> str:
    """Serialize a value as JSON. Raises ``ValueError`` or ``TypeError`` if JSON cannot represent the value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value, allow_nan=False)


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a schema's ``$ref`` within ``root``; empty if the reference does not exist."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = root
        for name in reference.removeprefix("#/").split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Types:
    """Return the types that a schema allows. ``root`` is the enclosing schema with ``$defs`` and ``definitions``."""
    schema = resolved(schema, root)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(type_name, schema.get("enum", [schema.get("const")])))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and depth < MAX_REFERENCES:
            kinds = [types_of(part, root, depth + 1) for part in schema[keyword]]
            return None if None in kinds else frozenset().union(*(part for part in kinds if part))
    if isinstance(schema.get("allOf"), list) and depth < MAX_REFERENCES:
        return next((found for part in schema["allOf"] if (found := types_of(part, root, depth + 1))), None)
    return None


def type_name(value: Any) -> str:
    """JSON Schema type of a value."""
    return TYPES.get(type(value), "null")


def typed_value(written: str, types: Types) -> str | None:
    """Convert a value to JSON whose strings have no quotes; None for an empty value if strings are not allowed.

    A text that can be parsed as another type has that type, unless only strings are allowed.
    """
    text = json.dumps(written, ensure_ascii=False)
    if types and "string" not in types:
        if not written.strip():
            return "null" if "null" in types else None
        if types <= NUMBERS and GROUPED.fullmatch(written.strip()):
            written = written.replace(",", "")
    if types == STRING or (value := literal(written, types)) is None:
        return text
    if value.type == "string":
        return text if types is None or "string" in types else value.json
    allowed = types is None or value.type in types or (value.type == "integer" and "number" in types)
    return value.json if allowed or (types and "string" not in types) else text


class Literal(NamedTuple):
    """A parsed value: its JSON Schema type and its JSON."""

    type: str
    json: str


def literal(written: str, types: Types = None) -> Literal | None:
    """Parse a JSON literal, which is kept unmodified, or a Python literal; None if it is neither.

    Args:
        types: allowed types. ``1, 2`` is an array only if arrays are allowed and strings are not.
    """
    written = written.strip()
    try:
        value = json.loads(written, parse_constant=_refuse)
        return Literal(type_name(value), written)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():  # ast.parse warns about unknown escapes
            warnings.simplefilter("ignore")
            tree = _Constants().visit(ast.parse(written, mode="eval"))
        value = ast.literal_eval(tree)
        is_array = types is not None and "array" in types and "string" not in types
        if isinstance(value, tuple) and not written.startswith("(") and not is_array:
            return None  # Python parses 1,000 as a tuple, but the model means a number or a string
        return Literal("array" if isinstance(value, tuple) else type_name(value), to_json(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"constant {name} is not JSON")


class _Constants(ast.NodeTransformer):
    """Replaces names of constants by their values (``true`` in ``{'a': true}``)."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id.lower()
        return ast.copy_location(ast.Constant(NAMES[name]), node) if name in NAMES else node
