"""Lax type conversion, as in the dialect's original server: ``"4"`` for a number, ``"true"`` for a boolean.

vLLM, SGLang and FastDeploy use pydantic's lax mode; Ollama and llama-server only convert between numbers.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any, Literal

import msgspec
from msgspec import inspect

Lax = Literal["", "numbers", "pydantic"]
"""Conversions of a dialect: none, between number types, or pydantic's lax mode."""
MAX_VALUES = 20_000
"""Maximum number of values that are converted."""
MAX_DIGITS = 64
"""Maximum length of a string that is converted to a number."""
INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?")
FLOAT = re.compile(r"[+-]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
BOOLEANS = dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True)
BOOLEANS |= dict.fromkeys(("0", "off", "f", "false", "n", "no"), False)


@dataclass(slots=True)
class _Node:
    """Types that a schema accepts for one value."""

    integer: bool = False
    number: bool = False
    boolean: bool = False
    text: bool = False
    """Any string; the strings of a ``Literal`` are in ``texts``."""
    texts: set[str] = field(default_factory=set)
    literals: list[Any] = field(default_factory=list)
    """Values of a ``Literal``."""
    fields: dict[str, _Node] = field(default_factory=dict)
    items: _Node | None = None
    """Node of an array's items."""
    values: _Node | None = None
    """Node of an object's values, for any name."""

    @property
    def converts(self) -> bool:
        """True if this value or nested values may be converted."""
        return self.integer or self.number or self.boolean or bool(self.fields or self.items or self.values)


def convert_types(document: dict[str, Any], schema: type[msgspec.Struct], lax: Lax) -> None:
    """Convert values of types that do not match the schema, in place."""
    queue: deque[tuple[Any, _Node]] = deque([(document, _node_of(schema))])
    seen = 0
    while queue and seen < MAX_VALUES:
        value, node = queue.popleft()
        children: list[tuple[Any, _Node | None]] = []
        if isinstance(value, dict):
            children = [(key, node.fields.get(key, node.values)) for key in value]
        elif isinstance(value, list) and node.items is not None:
            children = [(i, node.items) for i in range(min(len(value), MAX_VALUES))]
        seen += len(children)
        for key, inner in children:
            if inner is None or not inner.converts:
                continue
            if isinstance(value[key], dict | list):
                queue.append((value[key], inner))
            else:
                value[key] = _converted(value[key], inner, lax)


def literals_at(schema: type[msgspec.Struct], path: str) -> list[Any]:
    """Return the allowed values of the field with this msgspec path (``tools[0].type``); empty if not restricted."""
    node: _Node | None = _node_of(schema)
    for name, _ in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        if node is None:
            return []
        node = node.fields.get(name, node.values) if name else node.items or node.values
    if node is None:
        return []
    return node.literals + ([True, False] if node.boolean and not {True, False} & {*node.literals} else [])


def _converted(value: Any, node: _Node, lax: Lax) -> Any:
    if isinstance(value, bool):
        return value if node.boolean or lax != "pydantic" or not (node.integer or node.number) else int(value)
    if isinstance(value, int | float):
        if node.number or (node.integer and isinstance(value, int)):
            return value
        if node.integer and float(value).is_integer():
            return int(value)
        return bool(value) if node.boolean and value in (0, 1) and lax == "pydantic" else value
    if isinstance(value, str) and lax == "pydantic" and not node.text and value not in node.texts:
        return _read(value, node)
    return value


def _read(text: str, node: _Node) -> Any:
    """Convert a string to a number or boolean; returned unmodified if it is neither."""
    plain = text.strip().replace("_", "")
    if len(text) <= MAX_DIGITS:
        if node.integer and INTEGER.fullmatch(text.strip()):
            return int(plain.partition(".")[0])
        if node.number and FLOAT.fullmatch(text.strip()) and isfinite(result := float(plain)):
            return result
    return BOOLEANS.get(text.lower(), text) if node.boolean else text


@cache
def _node_of(schema: type[msgspec.Struct]) -> _Node:
    return _fill(_Node(), inspect.type_info(schema), {})


def _fill(node: _Node, kind: inspect.Type, seen: dict[type, _Node]) -> _Node:
    """Add the types that ``kind`` accepts to a node."""
    match kind:
        case inspect.Metadata():
            _fill(node, kind.type, seen)
        case inspect.UnionType():
            for one in kind.types:
                _fill(node, one, seen)
        case inspect.IntType():
            node.integer = True
        case inspect.FloatType():
            node.number = True
        case inspect.BoolType():
            node.boolean = True
        case inspect.StrType() | inspect.AnyType():
            node.text = True
        case inspect.LiteralType():
            node.literals += kind.values
            node.boolean |= any(isinstance(value, bool) for value in kind.values)
            node.texts |= {value for value in kind.values if isinstance(value, str)}
        case inspect.ListType():
            node.items = _fill(node.items or _Node(), kind.item_type, seen)
        case inspect.DictType():
            node.values = _fill(node.values or _Node(), kind.value_type, seen)
        case inspect.StructType():
            if kind.cls not in seen:
                seen[kind.cls] = struct = _Node()
                struct.fields = {one.encode_name: _fill(_Node(), one.type, seen) for one in kind.fields}
            node.fields = {**node.fields, **seen[kind.cls].fields}
    return node
