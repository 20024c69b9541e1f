"""Stored responses of the Responses API."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    Float,
    Index,
    Row,
    String,
    Table,
    delete,
    insert,
    select,
    update,
)

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .database import METADATA, Database

RESPONSES = Table(
    "responses",
    METADATA,
    Column("id", String(160), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("previous", String(160), nullable=False),
    Column("expires", Float, nullable=False),
    Column("beat", Float, nullable=False),
    Column("status", String(16), nullable=False),
    Column("document", JSON, nullable=False),
    Column("input", JSON, nullable=False),
    Index("responses_expires", "expires"),
)
"""``document`` is the response object, whose status is in ``status``, too; ``input`` the items of its own request,
without those of the responses before it; ``beat`` when the process that computes it last said so. Times are in seconds
since 1970."""
MAX_CHAIN = 1000
"""Responses before a response, which are its conversation."""
LOST_AFTER = 30.0
"""Seconds without one after which it has failed: its process has ended."""
PENDING = ("queued", "in_progress")
LOST = {"code": "server_error", "message": "the process that computed the response has ended; send the request again"}

Item = dict[str, Any]


class StoredResponse(NamedTuple):
    document: dict[str, Any]
    input: list[Item]


class ResponseStore:
    """Keeps responses, each for the owner that made it.

    Args:
        retention: seconds that a response is kept.
    """

    def __init__(self, database: Database, retention: float) -> None:
        self._database = database
        self._retention = retention

    async def add(self, owner: str, document: dict[str, Any], items: list[Item]) -> None:
        """Keep a new response."""
        now = time.time()
        times = {"expires": now + self._retention, "beat": now}
        values = {"id": document["id"], "owner": owner, "previous": document["previous_response_id"] or ""}

        def transaction(connection: Connection) -> None:
            connection.execute(delete(RESPONSES).where(RESPONSES.c.expires < now))
            kept = {"document": document, "status": document["status"], "input": items}
            connection.execute(insert(RESPONSES).values(**values, **times, **kept))

        await self._database.run(transaction)

    async def advance(self, owner: str, document: dict[str, Any]) -> bool:
        """Replace a background response that has not ended; returns False where it has, as it was cancelled or
        deleted."""

        def transaction(connection: Connection) -> bool:
            values = {"document": document, "status": document["status"], "beat": time.time()}
            changed = connection.execute(update(RESPONSES).where(*_pending(owner, document["id"])).values(**values))
            return changed.rowcount > 0

        return await self._database.run(transaction)

    async def get(self, owner: str, name: str, field: str = "response_id") -> StoredResponse:
        """A response. Raises ``PenstockError`` (``not_found``) where the owner has none of this id."""

        def transaction(connection: Connection) -> StoredResponse:
            return _current(_row(connection, owner, name, field))

        return await self._database.run(transaction)

    async def conversation(self, owner: str, name: str) -> list[Item]:
        """The items of a response and of all before it: input and output, the oldest first.

        Raises ``PenstockError``: ``not_found``; ``invalid`` where one is not finished, or there are too many.
        """

        def transaction(connection: Connection) -> list[Item]:
            parts: list[list[Item]] = []
            previous = name
            while previous:
                if len(parts) == 2 * MAX_CHAIN:
                    raise invalid("previous_response_id", f"has more than {MAX_CHAIN} responses before it", MAX_CHAIN)
                row = _row(connection, owner, previous, "previous_response_id")
                document = _current(row).document
                if document["status"] not in ("completed", "incomplete"):
                    raise invalid("previous_response_id", f"{previous} is {document['status']}")
                parts += [document["output"], row.input]
                previous = row.previous
            return [item for part in reversed(parts) for item in part]

        return await self._database.run(transaction)

    async def delete(self, owner: str, name: str) -> None:
        """Raises as ``get``."""

        def transaction(connection: Connection) -> None:
            _row(connection, owner, name, "response_id")
            connection.execute(delete(RESPONSES).where(RESPONSES.c.id == name))

        await self._database.run(transaction)

    async def cancel(self, owner: str, name: str) -> StoredResponse:
        """Mark a background response as cancelled, if it has not ended; its process then stops computing it. Raises as
        ``get``."""

        def transaction(connection: Connection) -> StoredResponse:
            stored = _current(_row(connection, owner, name, "response_id"))
            if not stored.document["background"]:
                raise invalid("response_id", f"{name} is no background response, which alone can be cancelled")
            document = {**stored.document, "status": "cancelled"}
            values = {"document": document, "status": "cancelled"}
            changed = connection.execute(update(RESPONSES).where(*_pending(owner, name)).values(**values))
            return StoredResponse(document, stored.input) if changed.rowcount else stored

        return await self._database.run(transaction)

    async def beat(self, owner: str, name: str) -> bool:
        """Say that a background response is being computed; returns whether it is still wanted."""

        def transaction(connection: Connection) -> bool:
            changed = connection.execute(update(RESPONSES).where(*_pending(owner, name)).values(beat=time.time()))
            return changed.rowcount > 0

        return await self._database.run(transaction)


def _pending(owner: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.status.in_(PENDING)


def _row(connection: Connection, owner: str, name: str, field: str) -> Row[Any]:
    where = (RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.expires >= time.time())
    if (row := connection.execute(select(RESPONSES).where(*where)).first()) is None:
        raise PenstockError(Code.NOT_FOUND, f"{field}: there is no response {name[:160]!r}", field)
    return row


def _current(row: Row[Any]) -> StoredResponse:
    """A response, failed where its process has ended."""
    document = row.document
    if row.status in PENDING and time.time() - row.beat > LOST_AFTER:
        document = {**document, "status": "failed", "error": LOST}
    return StoredResponse(document, row.input)
