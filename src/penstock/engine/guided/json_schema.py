"""Rewrites JSON Schemas for xgrammar, which silently ignores keywords that it does not know, and some combinations.

A schema is rewritten with keywords that xgrammar is known to enforce; all others are refused by name.
"""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedError

ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"
}  # fmt: skip
ROOT_KEYWORDS = {"$id", "$defs", "definitions"}
COMBINATORS = ("$ref", "anyOf", "oneOf", "allOf")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS_BY_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength"),
    "number": BOUNDS,
    "integer": BOUNDS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "boolean": (),
    "null": (),
}
TYPE_KEYWORDS = {keyword for keywords in KEYWORDS_BY_TYPE.values() for keyword in keywords}
LARGEST = 2**63 - 1
"""Largest magnitude of an integer in xgrammar."""
MIN_BOUND_DISTANCE = 1e-4
"""Smallest distance between the bounds of numbers: xgrammar generates six decimals, and with closer bounds it allows
the empty text."""
ANY = {"$ref": "#/$defs/any"}
ANYTHING = {
    "anyOf": [
        {"type": "string"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "array", "items": ANY},
        {"type": "object", "additionalProperties": ANY},
    ]
}
"""Any value, spelled out: xgrammar's own rule for it has other whitespace."""


def rewrite_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a schema with keywords that xgrammar enforces (``strict_mode``); it allows the same values, or fewer.

    Objects with ``properties`` allow no others, and a schema with keywords of a single type is of that type.

    Raises ``UnsupportedError`` with the name of an unsupported keyword, ``ValueError`` for an invalid schema.
    """
    return _SchemaRewriter(schema).rewrite()


class _SchemaRewriter:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._definition_names: dict[str, str] = {}
        """``$ref`` → name of its definition in the result."""
        self._unvisited: list[tuple[str, Any]] = []

    def rewrite(self) -> dict[str, Any]:
        root = self._part({name: value for name, value in self._root.items() if name not in ROOT_KEYWORDS})
        definitions: dict[str, Any] = {"any": ANYTHING}
        while self._unvisited:
            name, part = self._unvisited.pop()
            definitions[name] = self._part(part)
        return root | {"$defs": definitions}

    def _part(self, part: Any) -> dict[str, Any]:
        if part is False:
            raise UnsupportedError("false, which no value matches")
        if part is True:
            return ANY
        if not isinstance(part, dict):
            raise ValueError(f"a schema must be an object, is {part!r:.50}")
        keywords = {name: value for name, value in part.items() if name not in ANNOTATIONS}
        for name, value in keywords.items():
            several = name in ("oneOf", "allOf") and isinstance(value, list) and len(value) > 1
            if several or (name not in TYPE_KEYWORDS and name not in ("type", "enum", "const", *COMBINATORS)):
                raise UnsupportedError(name)
        for name in COMBINATORS:
            if name in keywords:
                return self._combined(name, keywords)
        if "enum" in keywords or "const" in keywords:
            return _constants(keywords)
        types = keywords.get(
            "type",
            [kind for kind in KEYWORDS_BY_TYPE if kind != "integer" and keywords.keys() & set(KEYWORDS_BY_TYPE[kind])],
        )
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not all(isinstance(kind, str) and kind in KEYWORDS_BY_TYPE for kind in types):
            raise ValueError(f"type must be of {', '.join(KEYWORDS_BY_TYPE)}, is {keywords['type']!r:.50}")
        if not types:
            if "type" in keywords:
                raise ValueError("type must name at least one")
            return ANY
        options = [
            self._typed(kind, {name: keywords[name] for name in KEYWORDS_BY_TYPE[kind] if name in keywords})
            for kind in types
        ]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _combined(self, name: str, keywords: dict[str, Any]) -> dict[str, Any]:
        if beside := next((other for other in keywords if other != name), None):
            raise UnsupportedError(f"{beside} beside {name}")
        if name == "$ref":
            return self._reference(keywords[name])
        if not isinstance(options := keywords[name], list) or not options:
            raise ValueError(f"{name} must be a list of at least one")
        return {"anyOf": [self._part(option) for option in options]}

    def _reference(self, ref: Any) -> dict[str, Any]:
        if ref == "#":
            return {"$ref": "#"}
        _, _, path = ref.partition("#/") if isinstance(ref, str) else ("", "", "")
        home, _, name = path.partition("/")
        known = self._root.get(home) if home in ("$defs", "definitions") and ref[0] == "#" else None
        if not isinstance(known, dict) or name not in known or set(name) & set("/~%"):
            raise UnsupportedError(f"$ref to {ref!r:.100}")
        if ref not in self._definition_names:
            self._definition_names[ref] = f"of{len(self._definition_names)}"
            self._unvisited.append((self._definition_names[ref], known[name]))
        return {"$ref": f"#/$defs/{self._definition_names[ref]}"}

    def _typed(self, kind: str, keywords: dict[str, Any]) -> dict[str, Any]:
        for name in keywords:
            if name.startswith(("min", "max")) and name not in BOUNDS:
                _check_integer(name, keywords[name], 0)
        if kind in ("integer", "number"):
            _check_bounds(kind, keywords)
        elif kind == "array":
            keywords = keywords | {"items": self._items(keywords.get("items", True))}
            if len(keywords.get("prefixItems", ())) > keywords.get("maxItems", LARGEST):
                raise UnsupportedError("fewer items than prefixItems describes")
            if "prefixItems" in keywords:
                keywords["prefixItems"] = [self._part(item) for item in keywords["prefixItems"]]
        elif kind == "object":
            keywords = self._object(keywords)
        return {"type": kind, **keywords}

    def _items(self, items: Any) -> Any:
        return False if items is False else self._part(items)

    def _object(self, keywords: dict[str, Any]) -> dict[str, Any]:
        properties, required = keywords.get("properties", {}), keywords.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")
        properties = {name: part for name, part in properties.items() if part is not False}
        if missing := [name for name in required if name not in properties]:
            raise UnsupportedError(f"required: {missing[0]!r:.100}, which properties does not describe")
        if keywords.get("minProperties", 0) > len(set(required)):
            raise UnsupportedError("minProperties beyond the properties that are required by name")
        others = keywords.get("additionalProperties", True)
        if keywords.get("properties"):
            if others not in (True, False, {}):
                raise UnsupportedError("additionalProperties beside properties")
            others = False
        result: dict[str, Any] = {"additionalProperties": self._items(others)}
        if properties:
            result |= {"properties": {n: self._part(part) for n, part in properties.items()}, "required": required}
        return result | {name: keywords[name] for name in ("maxProperties",) if name in keywords}


def _constants(keywords: dict[str, Any]) -> dict[str, Any]:
    name = "enum" if "enum" in keywords else "const"
    if beside := next((other for other in keywords if other not in (name, "type")), None):
        raise UnsupportedError(f"{beside} beside {name}")
    values = keywords["enum"] if name == "enum" else [keywords["const"]]
    if not isinstance(values, list):
        raise ValueError(f"enum must be a list, is {values!r:.50}")
    if types := keywords.get("type"):
        values = [value for value in values if _types_of(value) & set([types] if isinstance(types, str) else types)]
    if not values:
        raise UnsupportedError(f"{name} of nothing")
    for value in values:
        _check_constant(name, value)
    return {"enum": values}


def _check_bounds(kind: str, keywords: dict[str, Any]) -> None:
    for name, bound in keywords.items():
        if kind == "integer" and isinstance(bound, float):
            raise UnsupportedError(f"{name} of integers that is none itself")
        if not isinstance(bound, float):
            _check_integer(name, bound, None)
    low = [keywords[name] for name in ("minimum", "exclusiveMinimum") if name in keywords]
    high = [keywords[name] for name in ("maximum", "exclusiveMaximum") if name in keywords]
    minimum = (
        MIN_BOUND_DISTANCE if kind == "number" else ("exclusiveMinimum" in keywords) + ("exclusiveMaximum" in keywords)
    )
    if low and high and min(high) - max(low) < minimum:
        raise UnsupportedError(f"{' and '.join(keywords)} that leave nothing between them, or too little")


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    named: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {named.get(type(value), "null")}


def _check_constant(name: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UnsupportedError(f"{name} with a number of more than 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_constant(name, inner)


def _check_integer(name: str, value: Any, minimum: int | None) -> None:
    if type(value) is not int or (minimum is not None and value < minimum):
        words = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(f"{name} must be a number{words}, is {value!r:.50}")
    if abs(value) > LARGEST:
        raise UnsupportedError(f"{name} of more than 64 bits")
