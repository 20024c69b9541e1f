"""Removal of the keywords of a JSON Schema that constrain nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid".split())
"""Values of ``format`` that guided decoding enforces. JSON Schema defines every other value as an annotation."""
SCHEMA_MAPS = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
"""Keywords whose value maps names to schemas."""
SCHEMA_LISTS = frozenset("allOf anyOf oneOf prefixItems".split())
"""Keywords whose value is a list of schemas."""
SCHEMAS = frozenset(
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties propertyNames contains not if "
    "then else".split()
)
"""Keywords whose value is a schema (``items`` may also be a list of schemas)."""
ASSERTIONS = frozenset(
    "type enum const multipleOf minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength pattern format "
    "minItems maxItems uniqueItems minContains maxContains minProperties maxProperties required dependentRequired "
    "dependencies".split()
)
"""Keywords that constrain a value without a subschema."""
NUMBERS = "multipleOf minimum maximum minLength maxLength minItems maxItems minContains maxContains minProperties "
TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(SCHEMA_MAPS | {"dependentRequired", "dependencies"}, (dict, "an object")),
    **dict.fromkeys(SCHEMA_LISTS | {"enum"}, (list, "a list")),
    **dict.fromkeys(SCHEMAS - {"items"}, ((dict, bool), "a schema")),
    **dict.fromkeys(f"{NUMBERS} maxProperties".split(), ((int, float), "a number")),
    **dict.fromkeys(("pattern", "format", "$ref"), (str, "text")),
    "items": ((dict, bool, list), "a schema"),
    "type": ((str, list), "a type or a list of types"),
    "required": (list, "a list of names"),
    "uniqueItems": (bool, "true or false"),
}
"""Python types of a keyword's value, and a description for errors."""
REFERENCES = frozenset("$ref $dynamicRef $recursiveRef $schema $id id $anchor $dynamicAnchor $recursiveAnchor".split())
"""Keywords that refer to a schema, or identify one."""
KEYWORDS = SCHEMA_MAPS | SCHEMA_LISTS | SCHEMAS | ASSERTIONS | REFERENCES
"""Keywords of drafts 4 to 2020-12 that constrain a value, or identify a schema. All others are annotations."""
EVALUATING = frozenset("unevaluatedItems unevaluatedProperties contains minContains maxContains if then else".split())
"""Keywords that mark properties or items as evaluated (for ``unevaluated…``) even if they allow every instance."""
ANY: tuple[Any, ...] = (True, {})
"""Schemas that allow every value."""


def drop_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a JSON Schema (draft 4 to 2020-12) without annotations.

    The copy lacks unknown keywords, formats that are not enforced, keywords whose value allows every instance
    (``uniqueItems: false``), and keywords with a null value.

    Raises ``ValueError`` for a keyword whose value has the wrong type, ``RecursionError`` for a schema that is nested
    too deeply.
    """
    references = _values_of("$ref", schema)
    targets = (_resolve(reference, schema) for reference in references)
    unevaluated = [*_values_of("unevaluatedItems", schema), *_values_of("unevaluatedProperties", schema)]
    is_local = all(isinstance(reference, str) and reference.startswith("#") for reference in references)
    ignores_evaluation = is_local and all(value in ANY for value in unevaluated)
    cleaner = _Cleaner({id(target) for target in targets if isinstance(target, dict)}, ignores_evaluation)
    result: dict[str, Any] = cleaner.schema(schema)
    return result


@dataclass(frozen=True)
class _Cleaner:
    """Copies the subschemas of a schema."""

    targets: set[int]
    """``id`` of each object that a ``$ref`` points to; it may be inside an unknown keyword."""
    ignores_evaluation: bool
    """True if no keyword of the schema depends on which properties and items other keywords evaluate."""

    def schema(self, part: Any) -> Any:
        """Copy a schema. Raises ``ValueError`` if it is neither an object nor a bool, or a keyword has a wrong type."""
        if not isinstance(part, dict):
            if not isinstance(part, bool):
                raise ValueError(f"a schema must be an object, is {part!r:.50}")
            return part
        result = {}
        for name, value in part.items():
            if name not in KEYWORDS:
                if self._has_target(value):
                    result[name] = self._container(value)
                continue
            if value is None and name != "const":
                continue
            if name in TYPES and not isinstance(value, TYPES[name][0]):
                raise ValueError(f"{name} must be {TYPES[name][1]}, is {value!r:.50}")
            if not self._allows_all(name, value, part):
                result[name] = self._value(name, value)
        return result

    def _allows_all(self, name: str, value: Any, schema: dict[str, Any]) -> bool:
        """True if a keyword of a schema allows every instance."""
        if name in EVALUATING and not self.ignores_evaluation:
            return False
        match name:
            case "format":
                return isinstance(value, str) and value not in FORMATS
            case "uniqueItems" | "not":
                return value is False
            case "unevaluatedItems" | "unevaluatedProperties" | "additionalItems":
                return value in ANY
            case "propertyNames":
                return value in (*ANY, {"type": "string"})
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return isinstance(value, dict) and all(inner in (*ANY, []) for inner in value.values())
            case "contains" | "minContains":
                never = schema.get("minContains", 1) == 0 and "maxContains" not in schema
                return never or "contains" not in schema
            case "maxContains":
                return "contains" not in schema
            case "if" | "then" | "else":
                return "if" not in schema or all(schema.get(branch, True) in ANY for branch in ("then", "else"))
        return False

    def _value(self, name: str, value: Any) -> Any:
        if name in SCHEMA_MAPS:
            return {key: self.schema(inner) for key, inner in value.items()}
        if isinstance(value, list) and (name in SCHEMA_LISTS or name == "items"):
            return [self.schema(inner) for inner in value]
        return self.schema(value) if name in SCHEMAS else value

    def _container(self, value: Any) -> Any:
        """Copy the value of an unknown keyword: the targets of references in it as schemas, all else unchanged."""
        if id(value) in self.targets:
            return self.schema(value)
        if isinstance(value, dict):
            return {name: self._container(inner) for name, inner in value.items()}
        return [self._container(inner) for inner in value] if isinstance(value, list) else value

    def _has_target(self, value: Any) -> bool:
        if not self.targets or not isinstance(value, dict | list):
            return False
        inner = value.values() if isinstance(value, dict) else value
        return id(value) in self.targets or any(map(self._has_target, inner))


def _values_of(keyword: str, part: Any) -> list[Any]:
    """All values of a keyword in a document."""
    found, unvisited = [], [part]
    while unvisited:
        part = unvisited.pop()
        if isinstance(part, dict):
            found += [part[keyword]] if keyword in part else []
            unvisited += part.values()
        elif isinstance(part, list):
            unvisited += part
    return found


def _resolve(reference: Any, root: dict[str, Any]) -> Any:
    """Resolve a JSON pointer in a URI fragment (``#/$defs/x``); None if its target is absent."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    part: Any = root
    for name in unquote(reference[2:]).split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and name.isascii() and len(name) < 6 and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict):
            part = part.get(name)
        else:
            return None
    return part
