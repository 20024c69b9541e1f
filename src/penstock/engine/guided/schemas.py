"""JSON Schema as far as xgrammar keeps to it.

xgrammar passes over keywords that it does not know, and over some of those it does where others stand beside them. So a
schema is rewritten here from what it is known to keep to, and everything else is refused by name.
"""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedError

ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"
}  # fmt: skip
OF_ROOT = {"$id", "$defs", "definitions"}
COMBINED = ("$ref", "anyOf", "oneOf", "allOf")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OF_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength"),
    "number": BOUNDS,
    "integer": BOUNDS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "boolean": (),
    "null": (),
}
TYPED = {keyword for keywords in OF_TYPE.values() for keyword in keywords}
LARGEST = 2**63 - 1
"""Integers are no larger in xgrammar."""
CLOSEST = 1e-4
"""Between the bounds of numbers: xgrammar writes six decimals, and where none lie between it takes nothing for one."""
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
"""Said in full: what xgrammar writes for it has spaces of its own."""


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that asks for the same, or less, in words that xgrammar keeps to (its ``strict_mode``).

    Objects whose properties are listed have no others, and a part that has keywords of one type only is of that type.
    Raises ``UnsupportedError`` with the keyword's name where that cannot be, ``ValueError`` where the schema is none.
    """
    return _Rewriting(schema).rewrite()


class _Rewriting:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._names: dict[str, str] = {}
        """Of the definitions that are referred to, by how they are referred to."""
        self._left: list[tuple[str, Any]] = []

    def rewrite(self) -> dict[str, Any]:
        found = self._part({name: value for name, value in self._root.items() if name not in OF_ROOT})
        definitions: dict[str, Any] = {"any": ANYTHING}
        while self._left:
            name, part = self._left.pop()
            definitions[name] = self._part(part)
        return found | {"$defs": definitions}

    def _part(self, part: Any) -> dict[str, Any]:
        if part is False:
            raise UnsupportedError("false, which nothing is of")
        if part is True:
            return ANY
        if not isinstance(part, dict):
            raise ValueError(f"a schema must be an object, is {part!r:.50}")
        asked = {name: value for name, value in part.items() if name not in ANNOTATIONS}
        for name, value in asked.items():
            several = name in ("oneOf", "allOf") and isinstance(value, list) and len(value) > 1
            if several or (name not in TYPED and name not in ("type", "enum", "const", *COMBINED)):
                raise UnsupportedError(name)
        for name in COMBINED:
            if name in asked:
                return self._combined(name, asked)
        if "enum" in asked or "const" in asked:
            return _constants(asked)
        kinds = asked.get("type", [kind for kind in OF_TYPE if kind != "integer" and asked.keys() & set(OF_TYPE[kind])])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in OF_TYPE for kind in kinds):
            raise ValueError(f"type must be of {', '.join(OF_TYPE)}, is {asked['type']!r:.50}")
        if not kinds:
            if "type" in asked:
                raise ValueError("type must name at least one")
            return ANY
        found = [self._of(kind, {name: asked[name] for name in OF_TYPE[kind] if name in asked}) for kind in kinds]
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _combined(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        if beside := next((other for other in asked if other != name), None):
            raise UnsupportedError(f"{beside} beside {name}")
        if name == "$ref":
            return self._reference(asked[name])
        if not isinstance(options := asked[name], list) or not options:
            raise ValueError(f"{name} must be a list of at least one")
        return {"anyOf": [self._part(option) for option in options]}

    def _reference(self, where: Any) -> dict[str, Any]:
        if where == "#":
            return {"$ref": "#"}
        _, _, path = where.partition("#/") if isinstance(where, str) else ("", "", "")
        home, _, name = path.partition("/")
        known = self._root.get(home) if home in ("$defs", "definitions") and where[0] == "#" else None
        if not isinstance(known, dict) or name not in known or set(name) & set("/~%"):
            raise UnsupportedError(f"$ref to {where!r:.100}")
        if where not in self._names:
            self._names[where] = f"of{len(self._names)}"
            self._left.append((self._names[where], known[name]))
        return {"$ref": f"#/$defs/{self._names[where]}"}

    def _of(self, kind: str, asked: dict[str, Any]) -> dict[str, Any]:
        for name in asked:
            if name.startswith(("min", "max")) and name not in BOUNDS:
                _whole(name, asked[name], 0)
        if kind in ("integer", "number"):
            _check_bounds(kind, asked)
        elif kind == "array":
            asked = asked | {"items": self._items(asked.get("items", True))}
            if len(asked.get("prefixItems", ())) > asked.get("maxItems", LARGEST):
                raise UnsupportedError("fewer items than prefixItems describes")
            if "prefixItems" in asked:
                asked["prefixItems"] = [self._part(item) for item in asked["prefixItems"]]
        elif kind == "object":
            asked = self._object(asked)
        return {"type": kind, **asked}

    def _items(self, items: Any) -> Any:
        return False if items is False else self._part(items)

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        properties, required = asked.get("properties", {}), asked.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")
        properties = {name: part for name, part in properties.items() if part is not False}
        if missing := [name for name in required if name not in properties]:
            raise UnsupportedError(f"required: {missing[0]!r:.100}, which properties does not describe")
        if asked.get("minProperties", 0) > len(set(required)):
            raise UnsupportedError("minProperties beyond the properties that are required by name")
        others = asked.get("additionalProperties", True)
        if asked.get("properties"):
            if others not in (True, False, {}):
                raise UnsupportedError("additionalProperties beside properties")
            others = False
        found: dict[str, Any] = {"additionalProperties": self._items(others)}
        if properties:
            found |= {"properties": {n: self._part(part) for n, part in properties.items()}, "required": required}
        return found | {name: asked[name] for name in ("maxProperties",) if name in asked}


def _constants(asked: dict[str, Any]) -> dict[str, Any]:
    name = "enum" if "enum" in asked else "const"
    if beside := next((other for other in asked if other not in (name, "type")), None):
        raise UnsupportedError(f"{beside} beside {name}")
    values = asked["enum"] if name == "enum" else [asked["const"]]
    if not isinstance(values, list):
        raise ValueError(f"enum must be a list, is {values!r:.50}")
    if kinds := asked.get("type"):
        values = [value for value in values if _kinds(value) & set([kinds] if isinstance(kinds, str) else kinds)]
    if not values:
        raise UnsupportedError(f"{name} of nothing")
    for value in values:
        _check_constant(name, value)
    return {"enum": values}


def _check_bounds(kind: str, asked: dict[str, Any]) -> None:
    for name, bound in asked.items():
        if kind == "integer" and isinstance(bound, float):
            raise UnsupportedError(f"{name} of integers that is none itself")
        if not isinstance(bound, float):
            _whole(name, bound, None)
    low = [asked[name] for name in ("minimum", "exclusiveMinimum") if name in asked]
    high = [asked[name] for name in ("maximum", "exclusiveMaximum") if name in asked]
    least = CLOSEST if kind == "number" else ("exclusiveMinimum" in asked) + ("exclusiveMaximum" in asked)
    if low and high and min(high) - max(low) < least:
        raise UnsupportedError(f"{' and '.join(asked)} that leave nothing between them, or too little")


def _kinds(value: Any) -> set[str]:
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


def _whole(name: str, value: Any, least: int | None) -> None:
    if type(value) is not int or (least is not None and value < least):
        words = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be a number{words}, is {value!r:.50}")
    if abs(value) > LARGEST:
        raise UnsupportedError(f"{name} of more than 64 bits")
