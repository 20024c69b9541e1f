"""Unknown fields of a request: ignored and reported, or rejected (``strict_requests``)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

logger = logging.getLogger("penstock.requests")

HEADER = "x-penstock-ignored"
MAX_FIELDS = 32
"""Maximum number of unknown fields reported per request."""
MAX_NAME, MAX_HEADER = 64, 1024
"""Maximum number of characters of a field's name, and of the header."""
MAX_LOGGED = 4096
"""Maximum number of logged pairs of client and field that are remembered."""
CONSTRAINTS = frozenset(
    "response_format guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern guided_decoding "
    "guided_options_request structured_outputs structural_tag json_schema json_object grammar regex ebnf format choice "
    "output_config output_format response_schema response_mime_type responseSchema responseMimeType generationConfig "
    "guided_decoding_guide guided_decoding_guide_type schema extra_body text".split()
)
"""Fields that constrain the format of an answer in some dialect. If unknown in the request's dialect they are rejected:
the client would wrongly expect a constrained answer."""
UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")
"""Characters that are replaced in the header: spaces, commas, control and non-ASCII characters."""


class UnknownFields:
    """The unknown fields of one request.

    Args:
        strict: reject the first unknown field.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.places: dict[str, str] = {}
        """Path of the first occurrence (``messages[3].id``), by path without indexes (``messages[].id``)."""
        self._seen: set[str] = set()
        self._more = False

    def ignore(
        self, path: str, name: str, known: Iterable[str] = (), kind: str | None = None, value: Any = None
    ) -> None:
        """Add an unknown field.

        Args:
            path: path of the enclosing object with a trailing dot; empty for the request itself.
            known: field names that the object may have.
            kind: the path without indexes; None: same as ``path``.
            value: the field's value.

        Raises ``PenstockError``: ``invalid`` with the closest known name if requests are read strictly,
        ``unsupported`` for a field that constrains the answer.
        """
        if name in CONSTRAINTS and "[" not in path and _constrains(name, value):
            others = ", ".join(sorted(CONSTRAINTS.intersection(known)))
            message = f"{path}{name}: is not supported by this API" + (f"; use {others}" if others else "")
            if name == "extra_body":
                message = "extra_body: is an argument of OpenAI's Python client; send its fields at the top level"
            raise PenstockError(Code.UNSUPPORTED, message, path + name)
        if self.strict:
            place = path + name[:100]
            raise invalid(place, f"no such field{did_you_mean(name[:100], known)}")
        kind, name = path if kind is None else kind, name[:MAX_NAME]
        if kind + name in self._seen:  # already reported for another list element
            return
        if len(self._seen) == MAX_FIELDS:
            self._more = True
            return
        self._seen.add(kind + name)
        safe = UNSAFE.sub("?", name)
        self.places.setdefault(kind + safe, path + safe)

    def join(self, other: UnknownFields) -> None:
        """Add the unknown fields of another request."""
        self._more |= other._more
        for kind, place in other.places.items():
            if kind not in self.places and len(self.places) == MAX_FIELDS:
                self._more = True
                return
            self.places.setdefault(kind, place)

    def remove(self, document: Any, schema: type[msgspec.Struct]) -> None:
        """Remove fields that ``schema`` does not have from a JSON document, at all depths. Raises as ``ignore``."""
        _remove(document, _node_of(schema), "", "", self)

    @property
    def header(self) -> str:
        """Value of the response header: ASCII, at most ``MAX_HEADER`` characters; empty if all fields are known."""
        shown, size, more = [], 0, self._more
        for place in self.places.values():
            size += len(place) + 2
            if size > MAX_HEADER - 3:
                more = True
                break
            shown.append(place)
        return ", ".join([*shown, "..."] if more else shown)


class UnknownFieldLog:
    """Logs each unknown field once per client, within the last ``MAX_LOGGED`` pairs."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], None] = {}

    def log(self, request_id: str, client: str, unknown: UnknownFields) -> None:
        """Log the unknown fields of a request that this client has not sent before."""
        new = [kind for kind in unknown.places if (client, kind) not in self._logged]
        if not new:
            return
        self._logged |= dict.fromkeys((client, kind) for kind in new)
        while len(self._logged) > MAX_LOGGED:
            del self._logged[next(iter(self._logged))]
        fields = {"id": request_id, "client": client}
        logger.info("unknown fields are ignored: %s", ", ".join(new), extra={"fields": fields})


def _constrains(name: str, value: Any) -> bool:
    """Check whether the value of an unknown field of ``CONSTRAINTS`` constrains the answer."""
    if value in (None, False, "", {}, [], "text", "text/plain") or value == {"type": "text"}:
        return False
    if name in ("text", "output_config", "generationConfig"):
        # these objects constrain the answer only if one of their fields does
        return isinstance(value, dict) and any(_constrains(inner, value[inner]) for inner in CONSTRAINTS & value.keys())
    return name != "format" or value == "json" or isinstance(value, dict)


@dataclass(slots=True)
class _SchemaNode:
    """Node of the tree of structs in a schema."""

    known: dict[str, _SchemaNode | None] | None = None
    """Fields of an object, by name; None: the node is not an object."""
    closed: bool = False
    """True if ``strict_requests`` rejects unknown fields here (``forbid_unknown_fields``). In other objects, clients of
    the dialect send unknown fields that do not affect the answer."""
    items: _SchemaNode | None = None
    """Node of an array's items."""
    nested: list[tuple[str, _SchemaNode]] = field(default_factory=list)
    """Items of ``known`` that have a node."""


def _remove(document: Any, node: _SchemaNode, path: str, kind: str, unknown: UnknownFields) -> None:
    if isinstance(document, dict) and (known := node.known) is not None:
        if not known.keys() >= document.keys():
            for name in [name for name in document if name not in known]:
                if node.closed or not unknown.strict:
                    unknown.ignore(path, name, known, kind, document[name])
                del document[name]
        for name, inner in node.nested:
            if isinstance(value := document.get(name), dict):
                _remove(value, inner, f"{path}{name}.", f"{kind}{name}.", unknown)
            elif isinstance(value, list):
                _remove(value, inner, f"{path}{name}", f"{kind}{name}", unknown)
    elif isinstance(document, list) and (inner_items := node.items) is not None:
        for i, item in enumerate(document):
            if isinstance(item, dict):
                _remove(item, inner_items, f"{path}[{i}].", f"{kind}[].", unknown)


@cache
def _node_of(schema: type[msgspec.Struct]) -> _SchemaNode:
    node = _node(inspect.type_info(schema), {})
    assert node is not None
    return node


def _node(kind: inspect.Type, seen: dict[type, _SchemaNode]) -> _SchemaNode | None:
    if isinstance(kind, inspect.Metadata):
        return _node(kind.type, seen)
    if isinstance(kind, inspect.ListType):
        items = _node(kind.item_type, seen)
        return _SchemaNode(items=items) if items else None
    if isinstance(kind, inspect.UnionType):  # at most one member is an object, and at most one an array
        nodes = [node for node in (_node(one, seen) for one in kind.types) if node]
        objects = next((node for node in nodes if node.known is not None), None)
        arrays = next((node for node in nodes if node.items), None)
        if objects and arrays:
            return _SchemaNode(objects.known, objects.closed, arrays.items, objects.nested)
        return objects or arrays
    if not isinstance(kind, inspect.StructType):
        return None
    if kind.cls in seen:
        return seen[kind.cls]
    node = seen[kind.cls] = _SchemaNode({}, kind.forbid_unknown_fields)
    node.known = {one.encode_name: _node(one.type, seen) for one in kind.fields}
    node.nested = [(name, inner) for name, inner in node.known.items() if inner]
    return node
