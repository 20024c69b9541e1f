"""Item references: items of earlier responses and conversations that a request names by id instead of sending them."""

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
"""Item references in one request."""
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
    """Replace item references by the stored items, each at its first reference; returns the size of the request then,
    too.

    A reference to a reasoning item that is not stored is left out: clients send it in every request that follows, and
    the conversation can go on without it.

    Args:
        stores: where responses and conversations are kept; None where they are not.
        field: of the items in the request, for errors.
        size: bytes of the request.
        max_size: bytes of the largest request, stored items included.
        reserve: waits until there is memory for so many bytes; called before the items are loaded.

    Raises ``PenstockError``: ``not_found`` for an item that the owner does not have, ``unsupported`` where nothing is
    stored, ``invalid`` for too many references and for one without an id, ``too_large`` where the request has more than
    ``max_size`` bytes with the stored items; as ``reserve``.
    """
    names: dict[str, str] = {}
    """Id → path of the first reference to it."""
    for i, item in enumerate(items):
        if _is_reference(item):
            if not item.id:
                raise invalid(f"{field}[{i}].id", "is missing: an item_reference names an item by its id")
            names.setdefault(item.id, f"{field}[{i}]")
    if not names:
        return items, size
    if len(names) > MAX_REFERENCES:
        raise invalid(field, f"has {len(names)} item references, at most {MAX_REFERENCES} are resolved", MAX_REFERENCES)
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
    known = await asyncio.to_thread(msgspec.convert, found, dict[str, Item])  # large items would hold up others
    resolved = [known.pop(item.id or "", None) if _is_reference(item) else item for item in items]
    return [item for item in resolved if item is not None], size


def _is_reference(item: Item) -> bool:
    """Whether an item is a reference; the type may be left out."""
    by_id = item.type == "message" and item.id is not None and item.role is None and item.content is None
    return item.type == "item_reference" or by_id


def _refuse(name: str, path: str, stored: bool) -> NoReturn:
    if stored:
        message = f"there is no item {name[:160]!r}; send the item itself (items of responses with store: false, and "
        raise PenstockError(Code.NOT_FOUND, f"{path}: {message}expired ones, are not kept)", path)
    message = f"the item {name[:160]!r} cannot be looked up, as nothing is stored here; send the item itself "
    raise PenstockError(
        Code.UNSUPPORTED,
        f"{path}: {message}(AI SDK does with store: false), or start the server with --storage-dir",
        path,
    )
