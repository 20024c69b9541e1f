"""Stored responses of the Responses API."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, delete, insert, select, update

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .database import Database
from .tables import RESPONSES
from .usage import Quotas

MAX_CHAIN = 1000
"""Responses before a response, which are its conversation."""
LOST_AFTER = 30.0
"""Seconds without one after which it has failed: its process has ended."""
PENDING = ("queued", "in_progress")
ITEM_ID = re.compile(r"(?:rs|msg|fc|in)_(.{1,128})_[0-9]{1,9}")
"""Id of an item of the response ``resp_`` and what the group matches."""
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

    def __init__(self, database: Database, retention: float, quotas: Quotas) -> None:
        self._database = database
        self._retention = retention
        self._quotas = quotas

    async def add(self, owner: str, document: dict[str, Any], items: list[Item]) -> None:
        """Keep a new response. Raises ``PenstockError`` as ``Quotas.check``."""
        now = time.time()
        times = {"expires": now + self._retention, "beat": now}
        values = {"id": document["id"], "owner": owner, "previous": document["previous_response_id"] or ""}

        def transaction(connection: Connection) -> None:
            size = _size(document) + _size(items)
            self._quotas.check(connection, owner, "store", responses=1, bytes=size)
            kept = {"document": document, "status": document["status"], "input": items, "size": size}
            connection.execute(insert(RESPONSES).values(**values, **times, **kept))

        await self._database.run(transaction)

    async def check_room(self, owner: str) -> None:
        """Check that there is room for one more response. Raises ``PenstockError`` as ``Quotas.check``."""
        await self._database.run(
            lambda connection: self._quotas.check(connection, owner, "store", responses=1, bytes=1)
        )

    async def advance(self, owner: str, document: dict[str, Any]) -> bool:
        """Replace a background response that has not ended; returns False where it has, as it was cancelled or
        deleted."""

        def transaction(connection: Connection) -> bool:
            values = {"document": document, "status": document["status"], "beat": time.time()}
            grown = {"size": RESPONSES.c.size + _size(document) - _size(document | {"output": []})}
            where = _pending(owner, document["id"])
            changed = connection.execute(update(RESPONSES).where(*where).values(**values, **grown))
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

    async def items(self, owner: str, names: list[str]) -> dict[str, Item]:
        """The items of the owner's responses, input and output, that have one of these ids; others are left out."""
        wanted = set(names)
        responses = {f"resp_{match[1]}" for name in names if (match := ITEM_ID.fullmatch(name))}

        def transaction(connection: Connection) -> dict[str, Item]:
            found: dict[str, Item] = {}
            for name in sorted(responses):
                row = connection.execute(select(RESPONSES).where(*_kept(owner, name))).first()
                items = [*row.input, *row.document["output"]] if row else []
                found |= {item["id"]: item for item in items if item["id"] in wanted}
            return found

        return await self._database.run(transaction) if responses else {}

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

    async def remove_expired(self) -> None:
        old = RESPONSES.c.expires < time.time()
        await self._database.run(lambda connection: connection.execute(delete(RESPONSES).where(old)))


def _size(value: Any) -> int:
    """Bytes of its JSON."""
    return len(msgspec.json.encode(value))


def _pending(owner: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.status.in_(PENDING)


def _kept(owner: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.expires >= time.time()


def _row(connection: Connection, owner: str, name: str, field: str) -> Row[Any]:
    if (row := connection.execute(select(RESPONSES).where(*_kept(owner, name))).first()) is None:
        raise PenstockError(Code.NOT_FOUND, f"{field}: there is no response {name[:160]!r}", field)
    return row


def _current(row: Row[Any]) -> StoredResponse:
    """A response, failed where its process has ended."""
    document = row.document
    if row.status in PENDING and time.time() - row.beat > LOST_AFTER:
        document = {**document, "status": "failed", "error": LOST}
    return StoredResponse(document, row.input)
