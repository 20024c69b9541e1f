"""Conversations of OpenAI's API: stored items that requests reference by the conversation's id."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from penstock.core import Code, PenstockError

from .database import Database, newest_first, too_large
from .pages import Page, PageQuery
from .store import Store, reads, writes
from .tables import CONVERSATION_ITEMS, CONVERSATIONS
from .usage import Quotas

Item = dict[str, Any]
"""An item with its ``id``."""


class ConversationLimits(NamedTuple):
    """Maximum number of items, and maximum size in bytes, of a conversation."""

    items: int
    bytes: int


class Conversation(msgspec.Struct, frozen=True):
    """A conversation object of OpenAI's API."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class ConversationStore(Store):
    """Stores conversations. A conversation expires ``retention`` seconds after its last change.

    Args:
        limits: limits of each conversation.
    """

    def __init__(self, database: Database, retention: float, quotas: Quotas, limits: ConversationLimits) -> None:
        super().__init__(database, retention, quotas)
        self._limits = limits

    @writes
    def add(self, connection: Connection, owner: str, metadata: dict[str, str], items: list[Item]) -> Conversation:
        """Create a conversation. Raises ``PenstockError`` as ``Quotas.check``."""
        now, name = time.time(), f"conv_{uuid4().hex}"
        self._quotas.check(connection, owner, "conversation", conversations=1)
        values = {"id": name, "owner": owner, "created": now, "expires": now + self._retention}
        connection.execute(insert(CONVERSATIONS).values(**values, metadata=metadata, size=0))
        self._append(connection, owner, name, items)
        return Conversation(name, int(now), metadata)

    @reads
    def get(self, connection: Connection, owner: str, name: str) -> Conversation:
        """Return a conversation. Raises ``PenstockError`` (``not_found``) if the owner has no such conversation."""
        return _described(_row(connection, owner, name))

    @writes
    def update(self, connection: Connection, owner: str, name: str, metadata: dict[str, str]) -> Conversation:
        """Replace a conversation's metadata. Raises as ``get``."""
        row = _row(connection, owner, name)
        values = {"metadata": metadata, "expires": time.time() + self._retention}
        connection.execute(update(CONVERSATIONS).where(CONVERSATIONS.c.id == name).values(**values))
        return Conversation(row.id, int(row.created), metadata)

    @writes
    def delete(self, connection: Connection, owner: str, name: str) -> None:
        """Delete a conversation. Raises as ``get``."""
        _row(connection, owner, name)
        connection.execute(delete(CONVERSATION_ITEMS).where(CONVERSATION_ITEMS.c.conversation == name))
        connection.execute(delete(CONVERSATIONS).where(CONVERSATIONS.c.id == name))

    @reads
    def items_size(self, connection: Connection, owner: str, name: str, taken: int, max_size: int) -> int:
        """Return the size in bytes of the result of ``items``, without loading it; otherwise like ``items``."""
        return self._items_size(connection, owner, name, taken, max_size)

    @reads
    def items(self, connection: Connection, owner: str, name: str, taken: int, max_size: int) -> list[Item]:
        """Return all items, oldest first.

        Args:
            taken: size of the request without these items in bytes.
            max_size: maximum size of the request with these items in bytes.

        Raises as ``get``; ``too_large`` if the request exceeds ``max_size``; ``invalid`` if the conversation is full,
        so that no answer could be added.
        """
        self._items_size(connection, owner, name, taken, max_size)
        items = CONVERSATION_ITEMS.c
        found = select(items.document).where(items.conversation == name).order_by(items.position)
        return list(connection.execute(found).scalars())

    def _items_size(self, connection: Connection, owner: str, name: str, taken: int, max_size: int) -> int:
        size = int(_row(connection, owner, name).size)
        if taken + size > max_size:
            raise too_large("conversation", taken + size, max_size)
        self._check_room(connection, name, size, 1, 0)
        return size

    @reads
    def page(self, connection: Connection, owner: str, name: str, query: PageQuery) -> Page:
        """Return a page of a conversation's items. Raises as ``get``."""
        _row(connection, owner, name)
        items = CONVERSATION_ITEMS.c
        entries = select(items.document).where(items.conversation == name)
        found = newest_first(connection, entries, (items.position,), items.id, query)
        return found._replace(entries=[row.document for row in found.entries])

    @writes
    def append(self, connection: Connection, owner: str, name: str, items: list[Item]) -> None:
        """Append items. Raises as ``get`` and ``Quotas.check``; ``invalid`` beyond the limits of a conversation."""
        _row(connection, owner, name)
        self._append(connection, owner, name, items)

    @reads
    def item(self, connection: Connection, owner: str, name: str, item: str) -> Item:
        """Return an item. Raises ``PenstockError`` (``not_found``) if the conversation has no such item."""
        _row(connection, owner, name)
        document: Item = _item_row(connection, name, item).document
        return document

    async def find_size(self, owner: str, items: list[str]) -> int:
        """Return the size in bytes of the result of ``find``, without loading it."""
        return await self._database.read(lambda connection: _found_size(connection, owner, items)) if items else 0

    async def find(self, owner: str, items: list[str], taken: int, max_size: int) -> tuple[dict[str, Item], int]:
        """Return the items with these ids in the owner's conversations, and their size in bytes; ignore unknown ids.
        ``taken``, ``max_size`` and ``too_large`` as in ``items``."""

        def transaction(connection: Connection) -> tuple[dict[str, Item], int]:
            size = _found_size(connection, owner, items)
            if taken + size > max_size:
                raise too_large("input", taken + size, max_size)
            columns = CONVERSATION_ITEMS.c
            found = _found(select(columns.id, columns.document), owner, items)
            return {row.id: row.document for row in connection.execute(found)}, size

        return await self._database.read(transaction) if items else ({}, 0)

    @writes
    def delete_item(self, connection: Connection, owner: str, name: str, item: str) -> Conversation:
        """Delete an item. Raises as ``item``."""
        row = _row(connection, owner, name)
        found = _item_row(connection, name, item)
        connection.execute(delete(CONVERSATION_ITEMS).where(CONVERSATION_ITEMS.c.position == found.position))
        size = update(CONVERSATIONS).where(CONVERSATIONS.c.id == name)
        connection.execute(size.values(size=CONVERSATIONS.c.size - found.size))
        return _described(row)

    async def remove_expired(self) -> None:
        conversations = CONVERSATIONS.c
        old = select(conversations.id).where(conversations.expires < time.time())

        def transaction(connection: Connection, name: str) -> None:
            expired = (conversations.id == name, conversations.expires < time.time())
            if connection.execute(delete(CONVERSATIONS).where(*expired)).rowcount:
                connection.execute(delete(CONVERSATION_ITEMS).where(CONVERSATION_ITEMS.c.conversation == name))

        for name in await self._database.read(lambda connection: list(connection.execute(old).scalars())):
            await self._database.write(partial(transaction, name=name))

    def _check_room(self, connection: Connection, name: str, size: int, more_items: int, more_bytes: int) -> None:
        """Raise ``PenstockError`` (``invalid``) if a conversation of ``size`` bytes has no room for more items or
        bytes."""
        items = select(func.count()).where(CONVERSATION_ITEMS.c.conversation == name)
        count = int(connection.execute(items).scalar_one())
        for used, more, limit, unit in (
            (count, more_items, self._limits.items, "items"),
            (size, more_bytes, self._limits.bytes, "bytes"),
        ):
            if used + more > limit:
                option = f"max_conversation_{unit}"
                message = (
                    f"has {used} {unit}; {more} more exceed the limit of {limit} ({option}): "
                    "delete items, or create another conversation"
                )
                raise PenstockError(Code.INVALID, f"conversation: {message}", "conversation", limit, used + more)

    def _append(self, connection: Connection, owner: str, name: str, items: list[Item]) -> None:
        rows = [
            {"conversation": name, "id": item["id"], "document": item, "size": len(msgspec.json.encode(item))}
            for item in items
        ]
        size = sum(row["size"] for row in rows)
        before = connection.execute(select(CONVERSATIONS.c.size).where(CONVERSATIONS.c.id == name)).scalar_one()
        self._check_room(connection, name, before, len(rows), size)
        self._quotas.check(connection, owner, "conversation", bytes=size)
        if rows:
            connection.execute(insert(CONVERSATION_ITEMS), rows)
        values = {"size": CONVERSATIONS.c.size + size, "expires": time.time() + self._retention}
        connection.execute(update(CONVERSATIONS).where(CONVERSATIONS.c.id == name).values(**values))


def _found(query: Select[Any], owner: str, items: list[str]) -> Select[Any]:
    """Restrict a query to the items with these ids in the owner's conversations."""
    conversations = CONVERSATIONS.c
    mine = (conversations.owner == owner, conversations.expires >= time.time(), CONVERSATION_ITEMS.c.id.in_(items))
    return query.join(CONVERSATIONS, conversations.id == CONVERSATION_ITEMS.c.conversation).where(*mine)


def _found_size(connection: Connection, owner: str, items: list[str]) -> int:
    return int(connection.execute(_found(select(func.sum(CONVERSATION_ITEMS.c.size)), owner, items)).scalar() or 0)


def _row(connection: Connection, owner: str, name: str) -> Row[Any]:
    conversations = CONVERSATIONS.c
    where = (conversations.id == name, conversations.owner == owner, conversations.expires >= time.time())
    if (row := connection.execute(select(CONVERSATIONS).where(*where)).first()) is None:
        message = f"conversation: the conversation {name[:80]!r} does not exist or has expired"
        raise PenstockError(Code.NOT_FOUND, message, "conversation")
    return row


def _item_row(connection: Connection, name: str, item: str) -> Row[Any]:
    where = (CONVERSATION_ITEMS.c.conversation == name, CONVERSATION_ITEMS.c.id == item)
    if (row := connection.execute(select(CONVERSATION_ITEMS).where(*where)).first()) is None:
        raise PenstockError(Code.NOT_FOUND, f"item_id: the conversation has no item {item[:160]!r}", "item_id")
    return row


def _described(row: Row[Any]) -> Conversation:
    return Conversation(row.id, int(row.created), row.metadata)
