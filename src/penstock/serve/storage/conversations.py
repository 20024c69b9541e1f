"""Conversations of OpenAI's API: items that requests share by naming the conversation."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import msgspec
from sqlalchemy import Connection, Row, delete, insert, select, update

from penstock.core import Code, PenstockError

from .database import Database
from .tables import CONVERSATION_ITEMS, CONVERSATIONS
from .usage import Quotas

Item = dict[str, Any]
"""With its ``id``."""


class Conversation(msgspec.Struct, frozen=True):
    """A conversation, as OpenAI's API describes it."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class ConversationStore:
    """Keeps conversations, each for the owner that made it.

    Args:
        retention: seconds that a conversation is kept after its last change.
    """

    def __init__(self, database: Database, retention: float, quotas: Quotas) -> None:
        self._database = database
        self._retention = retention
        self._quotas = quotas

    async def add(self, owner: str, metadata: dict[str, str], items: list[Item]) -> Conversation:
        """Begin a conversation. Raises ``PenstockError`` as ``Quotas.check``."""
        now, name = time.time(), f"conv_{uuid4().hex}"

        def transaction(connection: Connection) -> None:
            self._quotas.check(connection, owner, "conversation", conversations=1)
            values = {"id": name, "owner": owner, "created": now, "expires": now + self._retention}
            connection.execute(insert(CONVERSATIONS).values(**values, metadata=metadata, size=0))
            self._append(connection, owner, name, items)

        await self._database.run(transaction)
        return Conversation(name, int(now), metadata)

    async def get(self, owner: str, name: str) -> Conversation:
        """A conversation. Raises ``PenstockError`` (``not_found``) where the owner has none of this id."""
        return await self._database.run(lambda connection: _described(_row(connection, owner, name)))

    async def update(self, owner: str, name: str, metadata: dict[str, str]) -> Conversation:
        """Replace its metadata. Raises as ``get``."""

        def transaction(connection: Connection) -> Conversation:
            row = _row(connection, owner, name)
            values = {"metadata": metadata, "expires": time.time() + self._retention}
            connection.execute(update(CONVERSATIONS).where(CONVERSATIONS.c.id == name).values(**values))
            return Conversation(row.id, int(row.created), metadata)

        return await self._database.run(transaction)

    async def delete(self, owner: str, name: str) -> None:
        """Raises as ``get``."""

        def transaction(connection: Connection) -> None:
            _row(connection, owner, name)
            connection.execute(delete(CONVERSATION_ITEMS).where(CONVERSATION_ITEMS.c.conversation == name))
            connection.execute(delete(CONVERSATIONS).where(CONVERSATIONS.c.id == name))

        await self._database.run(transaction)

    async def items(self, owner: str, name: str) -> list[Item]:
        """Its items, the oldest first. Raises as ``get``."""

        def transaction(connection: Connection) -> list[Item]:
            _row(connection, owner, name)
            items = CONVERSATION_ITEMS.c
            found = select(items.document).where(items.conversation == name).order_by(items.position)
            return list(connection.execute(found).scalars())

        return await self._database.run(transaction)

    async def append(self, owner: str, name: str, items: list[Item]) -> None:
        """Add items at its end. Raises as ``get``, and as ``Quotas.check``."""

        def transaction(connection: Connection) -> None:
            _row(connection, owner, name)
            self._append(connection, owner, name, items)

        await self._database.run(transaction)

    async def item(self, owner: str, name: str, item: str) -> Item:
        """One of its items. Raises ``PenstockError`` (``not_found``) where it has none of this id."""

        def transaction(connection: Connection) -> Item:
            _row(connection, owner, name)
            document: Item = _item_row(connection, name, item).document
            return document

        return await self._database.run(transaction)

    async def find(self, owner: str, items: list[str]) -> dict[str, Item]:
        """The items of the owner's conversations that have one of these ids; others are left out."""

        def transaction(connection: Connection) -> dict[str, Item]:
            kept, conversations = CONVERSATION_ITEMS.c, CONVERSATIONS.c
            query = select(kept.id, kept.document).join(CONVERSATIONS, conversations.id == kept.conversation)
            mine = (conversations.owner == owner, conversations.expires >= time.time(), kept.id.in_(items))
            return {row.id: row.document for row in connection.execute(query.where(*mine))}

        return await self._database.run(transaction) if items else {}

    async def delete_item(self, owner: str, name: str, item: str) -> Conversation:
        """Raises as ``item``."""

        def transaction(connection: Connection) -> Conversation:
            row = _row(connection, owner, name)
            found = _item_row(connection, name, item)
            connection.execute(delete(CONVERSATION_ITEMS).where(CONVERSATION_ITEMS.c.position == found.position))
            size = update(CONVERSATIONS).where(CONVERSATIONS.c.id == name)
            connection.execute(size.values(size=CONVERSATIONS.c.size - found.size))
            return _described(row)

        return await self._database.run(transaction)

    async def remove_expired(self) -> None:
        def transaction(connection: Connection) -> None:
            old = CONVERSATIONS.c.expires < time.time()
            names = select(CONVERSATIONS.c.id).where(old)
            connection.execute(delete(CONVERSATION_ITEMS).where(CONVERSATION_ITEMS.c.conversation.in_(names)))
            connection.execute(delete(CONVERSATIONS).where(old))

        await self._database.run(transaction)

    def _append(self, connection: Connection, owner: str, name: str, items: list[Item]) -> None:
        rows = [
            {"conversation": name, "id": item["id"], "document": item, "size": len(msgspec.json.encode(item))}
            for item in items
        ]
        size = sum(row["size"] for row in rows)
        self._quotas.check(connection, owner, "conversation", bytes=size)
        if rows:
            connection.execute(insert(CONVERSATION_ITEMS), rows)
        values = {"size": CONVERSATIONS.c.size + size, "expires": time.time() + self._retention}
        connection.execute(update(CONVERSATIONS).where(CONVERSATIONS.c.id == name).values(**values))


def _row(connection: Connection, owner: str, name: str) -> Row[Any]:
    conversations = CONVERSATIONS.c
    where = (conversations.id == name, conversations.owner == owner, conversations.expires >= time.time())
    if (row := connection.execute(select(CONVERSATIONS).where(*where)).first()) is None:
        words = f"conversation: there is no conversation {name[:80]!r}"
        raise PenstockError(Code.NOT_FOUND, words, "conversation")
    return row


def _item_row(connection: Connection, name: str, item: str) -> Row[Any]:
    where = (CONVERSATION_ITEMS.c.conversation == name, CONVERSATION_ITEMS.c.id == item)
    if (row := connection.execute(select(CONVERSATION_ITEMS).where(*where)).first()) is None:
        raise PenstockError(Code.NOT_FOUND, f"item_id: the conversation has no item {item[:160]!r}", "item_id")
    return row


def _described(row: Row[Any]) -> Conversation:
    return Conversation(row.id, int(row.created), row.metadata)
