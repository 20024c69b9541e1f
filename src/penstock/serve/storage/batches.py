"""Store of batches and their state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from penstock.core import Code, PenstockError

from .database import newest_first
from .pages import Page, PageQuery
from .store import Store, reads, writes
from .tables import BATCHES, OPEN

Document = dict[str, Any]
"""A batch object of OpenAI's API."""


class BatchStore(Store):
    """Stores batches in the database."""

    @writes
    def add(self, connection: Connection, owner: str, document: Document) -> None:
        """Store a new batch. Raises ``PenstockError`` as ``Quotas.check``."""
        self._quotas.check(connection, owner, "input_file_id", batches=1)
        now = time.time()
        times = {"created": now, "expires": now + self._retention}
        values = {"id": document["id"], "owner": owner, "status": document["status"], "document": document}
        connection.execute(insert(BATCHES).values(**values, **times))

    @reads
    def get(self, connection: Connection, owner: str, name: str) -> Document:
        """Return a batch. Raises ``PenstockError`` (``not_found``) if the owner has no batch with this id."""
        where = (BATCHES.c.id == name, BATCHES.c.owner == owner)
        if (row := connection.execute(select(BATCHES).where(*where)).first()) is None:
            message = f"batch_id: the batch {name[:80]!r} does not exist or has expired"
            raise PenstockError(Code.NOT_FOUND, message, "batch_id")
        return _document(row)

    @reads
    def page(self, connection: Connection, owner: str, query: PageQuery) -> Page:
        """Return a page of the owner's batches."""
        batches = BATCHES.c
        entries = select(BATCHES).where(batches.owner == owner)
        found = newest_first(connection, entries, (batches.created, batches.id), batches.id, query)
        return found._replace(entries=[_document(row) for row in found.entries])

    @reads
    def open(self, connection: Connection) -> list[tuple[str, str]]:
        """Return owner and id of all unfinished batches, oldest first."""
        batches = BATCHES.c
        found = select(batches.owner, batches.id).where(batches.status.in_(OPEN))
        return [(row.owner, row.id) for row in connection.execute(found.order_by(batches.created, batches.id))]

    @writes
    def change(self, connection: Connection, name: str, change: Callable[[Document], Document]) -> Document | None:
        """Replace an unfinished batch by the result of ``change``. Returns the current batch, or None if it was
        deleted."""
        row = connection.execute(select(BATCHES).where(BATCHES.c.id == name).with_for_update()).first()
        if row is None or row.status not in OPEN:
            return _document(row) if row else None
        changed = change(_document(row))
        values = {"document": changed, "status": changed["status"]}
        connection.execute(update(BATCHES).where(BATCHES.c.id == name).values(**values))
        return changed

    async def remove_expired(self) -> None:
        old = (BATCHES.c.expires < time.time(), BATCHES.c.status.not_in(OPEN))
        await self._database.delete_in_parts(BATCHES, *old)


def _document(row: Row[Any]) -> Document:
    return {**row.document, "status": row.status}
