"""Batches of requests, and what has become of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from penstock.core import Code, PenstockError

from .database import Database
from .tables import BATCHES, OPEN
from .usage import Quotas

Document = dict[str, Any]
"""A batch object."""


class BatchStore:
    """Keeps batches, each for the owner that made it.

    Args:
        retention: seconds that a batch is kept.
    """

    def __init__(self, database: Database, retention: float, quotas: Quotas) -> None:
        self._database = database
        self._retention = retention
        self._quotas = quotas

    async def add(self, owner: str, document: Document) -> None:
        """Keep a new batch. Raises ``PenstockError`` as ``Quotas.check``."""
        now = time.time()
        times = {"created": now, "expires": now + self._retention}

        def transaction(connection: Connection) -> None:
            self._quotas.check(connection, owner, "input_file_id", batches=1)
            values = {"id": document["id"], "owner": owner, "status": document["status"], "document": document}
            connection.execute(insert(BATCHES).values(**values, **times))

        await self._database.run(transaction)

    async def get(self, owner: str, name: str) -> Document:
        """A batch. Raises ``PenstockError`` (``not_found``) where the owner has none of this id."""

        def transaction(connection: Connection) -> Row[Any] | None:
            where = (BATCHES.c.id == name, BATCHES.c.owner == owner)
            return connection.execute(select(BATCHES).where(*where)).first()

        if (row := await self._database.run(transaction)) is None:
            raise PenstockError(Code.NOT_FOUND, f"batch_id: there is no batch {name[:80]!r}", "batch_id")
        return _document(row)

    async def all(self, owner: str) -> list[Document]:
        """The owner's batches, newest first."""

        def transaction(connection: Connection) -> list[Row[Any]]:
            newest = select(BATCHES).where(BATCHES.c.owner == owner).order_by(BATCHES.c.created.desc(), BATCHES.c.id)
            return list(connection.execute(newest))

        return [_document(row) for row in await self._database.run(transaction)]

    async def open(self) -> list[tuple[str, Document]]:
        """Owner and batch of all that are not finished, oldest first."""

        def transaction(connection: Connection) -> list[Row[Any]]:
            oldest = select(BATCHES).where(BATCHES.c.status.in_(OPEN)).order_by(BATCHES.c.created, BATCHES.c.id)
            return list(connection.execute(oldest))

        return [(row.owner, _document(row)) for row in await self._database.run(transaction)]

    async def change(self, name: str, change: Callable[[Document], Document]) -> Document | None:
        """Replace a batch by what ``change`` makes of it, if it is not finished. Returns what it is then; None where
        it is gone."""

        def transaction(connection: Connection) -> Document | None:
            row = connection.execute(select(BATCHES).where(BATCHES.c.id == name).with_for_update()).first()
            if row is None or row.status not in OPEN:
                return _document(row) if row else None
            changed = change(_document(row))
            values = {"document": changed, "status": changed["status"]}
            connection.execute(update(BATCHES).where(BATCHES.c.id == name).values(**values))
            return changed

        return await self._database.run(transaction)

    async def remove_expired(self) -> None:
        old = (BATCHES.c.expires < time.time(), BATCHES.c.status.not_in(OPEN))
        await self._database.run(lambda connection: connection.execute(delete(BATCHES).where(*old)))


def _document(row: Row[Any]) -> Document:
    return {**row.document, "status": row.status}
