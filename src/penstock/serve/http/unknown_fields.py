"""Fields of a request that its schema does not have: ignored and told, or refused (``strict_requests``)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from penstock.config.settings import did_you_mean
from penstock.core.errors import invalid

logger = logging.getLogger("penstock.requests")

HEADER = "x-penstock-ignored"
MOST_FIELDS = 32
"""That a request's header and log line name."""
MOST_NAME, MOST_HEADER = 64, 1024
"""Characters of a name, and of all of them."""
MOST_TOLD = 4096
"""Fields and clients that are remembered, so that each is logged once."""
UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")
"""What a name may not bring into a header: spaces, commas, control characters, anything but ASCII."""


class UnknownFields:
    """The unknown fields of one request.

    Args:
        strict: refuse the first one.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.places: dict[str, str] = {}
        """Where each field was seen first (``messages[3].id``), by its path without indexes (``messages[].id``)."""
        self._seen: set[str] = set()
        self._more = False

    def ignore(self, path: str, name: str, known: Iterable[str] = (), kind: str | None = None) -> None:
        """Note a field that is ignored.

        Args:
            path: of the object that has it, with a dot at its end; nothing for the request itself.
            known: names that the object may have.
            kind: the path without indexes, where it has any.

        Raises ``PenstockError`` (``invalid``) with the nearest known name where requests are read strictly.
        """
        if self.strict:
            place = path + name[:100]
            raise invalid(place, f"no such field{did_you_mean(name[:100], known)}")
        kind, name = path if kind is None else kind, name[:MOST_NAME]
        if kind + name in self._seen:  # as often as a request has messages
            return
        if len(self._seen) == MOST_FIELDS:
            self._more = True
            return
        self._seen.add(kind + name)
        safe = UNSAFE.sub("?", name)
        self.places.setdefault(kind + safe, path + safe)

    def join(self, other: UnknownFields) -> None:
        """Note what was ignored of another request, too."""
        self._more |= other._more
        for kind, place in other.places.items():
            if kind not in self.places and len(self.places) == MOST_FIELDS:
                self._more = True
                return
            self.places.setdefault(kind, place)

    def remove(self, found: Any, schema: type[msgspec.Struct]) -> None:
        """Take what ``schema`` does not have out of a JSON document, at all depths. Raises as ``ignore`` does."""
        _remove(found, _node_of(schema), "", "", self)

    @property
    def header(self) -> str:
        """ASCII, at most ``MOST_HEADER`` characters; nothing where all fields are known."""
        told, size, more = [], 0, self._more
        for place in self.places.values():
            size += len(place) + 2
            if size > MOST_HEADER - 3:
                more = True
                break
            told.append(place)
        return ", ".join([*told, "..."] if more else told)


class UnknownFieldLog:
    """Logs each unknown field once a client. What was logged longest ago is forgotten, and then logged again."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], None] = {}

    def log(self, request_id: str, client: str, unknown: UnknownFields) -> None:
        """Log the fields of a request that are ignored and that this client has not sent before."""
        new = [kind for kind in unknown.places if (client, kind) not in self._told]
        if not new:
            return
        self._told |= dict.fromkeys((client, kind) for kind in new)
        while len(self._told) > MOST_TOLD:
            del self._told[next(iter(self._told))]
        facts = {"id": request_id, "client": client}
        logger.info("unknown fields are ignored: %s", ", ".join(new), extra={"facts": facts})


@dataclass(slots=True)
class _Node:
    """What a schema says of a value, as far as there are structs in it."""

    known: dict[str, _Node | None] | None = None
    """Of an object: its fields."""
    closed: bool = False
    """Whether a strict reader refuses others; otherwise they are what this dialect is known to send and changes no
    answer."""
    items: _Node | None = None
    """Of an array's items."""
    nested: list[tuple[str, _Node]] = field(default_factory=list)
    """The known fields that have nodes themselves."""


def _remove(found: Any, node: _Node, path: str, kind: str, unknown: UnknownFields) -> None:
    if isinstance(found, dict) and (known := node.known) is not None:
        if not known.keys() >= found.keys():
            for name in [name for name in found if name not in known]:
                if node.closed or not unknown.strict:
                    unknown.ignore(path, name, known, kind)
                del found[name]
        for name, inner in node.nested:
            if isinstance(value := found.get(name), dict):
                _remove(value, inner, f"{path}{name}.", f"{kind}{name}.", unknown)
            elif isinstance(value, list):
                _remove(value, inner, f"{path}{name}", f"{kind}{name}", unknown)
    elif isinstance(found, list) and (inner_items := node.items) is not None:
        for i, item in enumerate(found):
            if isinstance(item, dict):
                _remove(item, inner_items, f"{path}[{i}].", f"{kind}[].", unknown)


@cache
def _node_of(schema: type[msgspec.Struct]) -> _Node:
    node = _node(inspect.type_info(schema), {})
    assert node is not None
    return node


def _node(kind: inspect.Type, seen: dict[type, _Node]) -> _Node | None:
    if isinstance(kind, inspect.Metadata):
        return _node(kind.type, seen)
    if isinstance(kind, inspect.ListType):
        items = _node(kind.item_type, seen)
        return _Node(items=items) if items else None
    if isinstance(kind, inspect.UnionType):  # of which at most one is an object, and one an array
        found = [node for node in (_node(one, seen) for one in kind.types) if node]
        objects = next((node for node in found if node.known is not None), None)
        arrays = next((node for node in found if node.items), None)
        if objects and arrays:
            return _Node(objects.known, objects.closed, arrays.items, objects.nested)
        return objects or arrays
    if not isinstance(kind, inspect.StructType):
        return None
    if kind.cls in seen:
        return seen[kind.cls]
    node = seen[kind.cls] = _Node({}, kind.forbid_unknown_fields)
    node.known = {one.encode_name: _node(one.type, seen) for one in kind.fields}
    node.nested = [(name, inner) for name, inner in node.known.items() if inner]
    return node
