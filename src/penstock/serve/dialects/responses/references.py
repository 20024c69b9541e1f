"""Item references: a request may send the id of an item of an earlier response or conversation instead of the item."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .schema import Item

if TYPE_CHECKING:
    from .stored import Stores

MAX_REFERENCES = 1000
"""Maximum number of item references in a request."""
REASONING = "rs_"
"""Prefix of the ids of reasoning items."""


async def resolve_references(
    items: list[Item],
    stores: Stores | None,
    owner: str,
    field: str,
    size: int,
    max_size: int,
    reserve: Callable[[int], Awaitable[None]],
) -> tuple[list[Item], int]:
    """Replace item references with the stored items. Repeated references to an item are dropped.

    References to reasoning items that are not stored are dropped, too: clients repeat such references in all following
    requests, and the conversation can continue without the reasoning.

    Args:
        stores: storage of responses and conversations; None: nothing is stored.
        owner: tenant whose stored items may be used.
        field: name of the field with the items, for errors.
        size: size of the request, bytes.
        max_size: maximum size of the request with the stored items, bytes.
        reserve: waits until memory for a number of bytes is free; called before the items are loaded.

    Returns:
        The items, and the size of the request with the stored items in bytes.

    Raises ``PenstockError``: ``not_found`` for an item that the owner does not have, ``unsupported`` if nothing is
    stored, ``invalid`` for too many references or a reference without an id, ``too_large`` if the request with the
    stored items exceeds ``max_size``; and as ``reserve`` does.
    """
    names: dict[str, str] = {}
    """Id of a referenced item → path of the first reference to it."""
    for i, item in enumerate(items):
        if _is_reference(item):
            if not item.id:
                raise invalid(f"{field}[{i}].id", "is missing; an item_reference must have the id of an item")
            names.setdefault(item.id, f"{field}[{i}]")
    if not names:
        return items, size
    if len(names) > MAX_REFERENCES:
        raise invalid(field, f"has {len(names)} item references; the maximum is {MAX_REFERENCES}", MAX_REFERENCES)
    found: dict[str, Any] = {}
    if stores:
        expected = await stores.responses.items_size(owner, list(names))
        expected += await stores.conversations.find_size(owner, list(names))
        await reserve(min(expected, max_size))
        found, added = await stores.responses.items(owner, list(names), size, max_size)
        rest = [name for name in names if name not in found]
        more, more_added = await stores.conversations.find(owner, rest, size + added, max_size)
        found |= more
        size += added + more_added
    for name, path in names.items():
        if name not in found and not name.startswith(REASONING):
            _refuse(name, path, stores is not None)
    known = await asyncio.to_thread(msgspec.convert, found, dict[str, Item])  # converting large items is slow
    resolved = [known.pop(item.id or "", None) if _is_reference(item) else item for item in items]
    return [item for item in resolved if item is not None], size


def _is_reference(item: Item) -> bool:
    """True for an item reference. Clients may omit its type: a message with only an id is a reference, too."""
    by_id = item.type == "message" and item.id is not None and item.role is None and item.content is None
    return item.type == "item_reference" or by_id


def _refuse(name: str, path: str, stored: bool) -> NoReturn:
    if stored:
        message = f"item {name[:160]!r} is not stored (expired, or from a response with store: false); send it instead"
        raise PenstockError(Code.NOT_FOUND, f"{path}: {message}", path)
    message = (
        f"{path}: the server stores no items; send item {name[:160]!r} itself "
        "(the AI SDK does with store: false), or start the server with --storage-dir"
    )
    raise PenstockError(Code.UNSUPPORTED, message, path)
