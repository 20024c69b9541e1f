"""Stored responses of the Responses API."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Text, cast, delete, func, insert, select, update

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .database import Database, too_large
from .pages import Page, PageQuery
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

OUTPUT = RESPONSES.c.document["output"]
LENGTH = func.length(cast(RESPONSES.c.input, Text)) + func.length(cast(OUTPUT, Text))
"""Characters of a response's items, input and output, as JSON."""
CLOCK_STEP = 5.0
"""Seconds by which the system's clock has been set, or the machine been suspended."""
Document = dict[str, Any]
"""A response object."""
Item = dict[str, Any]


class ResponseStore:
    """Keeps responses, each for the owner that made it.

    Args:
        retention: seconds that a response is kept.
    """

    def __init__(self, database: Database, retention: float, quotas: Quotas) -> None:
        self._database = database
        self._retention = retention
        self._quotas = quotas
        self._clock_offset = time.time() - time.monotonic()
        """Seconds between the two clocks when they were last compared."""
        self._clock_stepped = -math.inf
        """When a step of the clock was noticed last, on the monotonic clock."""

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

        await self._database.write(transaction)

    async def check_room(self, owner: str) -> None:
        """Check that there is room for one more response. Raises ``PenstockError`` as ``Quotas.check``."""
        await self._database.read(
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

        return await self._database.write(transaction)

    async def get(self, owner: str, name: str) -> Document:
        """The response object. Raises ``PenstockError`` (``not_found``) where the owner has none of this id."""
        row = await self._database.read(lambda connection: _row(connection, owner, name, RESPONSES.c.document))
        return self._current(row)

    async def input_page(self, owner: str, name: str, query: PageQuery) -> Page:
        """A page of the input of a response; other items are not decoded. Raises as ``get``."""

        def transaction(connection: Connection) -> Page:
            row = _row(connection, owner, name, cast(RESPONSES.c.input, Text).label("input"))
            items = msgspec.json.decode(row.input, type=list[msgspec.Raw])
            order = items if query.ascending else items[::-1]
            if query.after:
                found = (i for i, item in enumerate(order, 1) if _id_of(item) == query.after)
                order = order[next(found, len(order)) :]
            return Page([msgspec.json.decode(item) for item in order[: query.limit]], len(order) > query.limit)

        return await self._database.read(transaction)

    async def conversation_size(self, owner: str, name: str, taken: int, max_size: int) -> int:
        """The size of ``conversation`` in characters of JSON; no item is loaded. Arguments and errors as there."""
        return await self._database.read(lambda connection: self._chain(connection, owner, name, taken, max_size)[1])

    async def conversation(self, owner: str, name: str, taken: int, max_size: int) -> list[Item]:
        """The items of a response and of all before it, input and output, the oldest first.

        Args:
            taken: bytes that the request has without them.
            max_size: bytes of a request, which has all items.

        Raises ``PenstockError``: ``not_found``; ``invalid`` where one is not finished, or there are too many;
        ``too_large`` where the request has more than ``max_size`` bytes with them.
        """

        def transaction(connection: Connection) -> list[Item]:
            items: list[Item] = []
            for each in reversed(self._chain(connection, owner, name, taken, max_size)[0]):
                row = _row(connection, owner, each, RESPONSES.c.input, OUTPUT.label("output"))
                items += row.input + row.output
            return items

        return await self._database.read(transaction)

    def _chain(self, connection: Connection, owner: str, name: str, taken: int, max_size: int) -> tuple[list[str], int]:
        """The ids of a response and of all before it, the latest first; and their size in characters of JSON."""
        names: list[str] = []
        previous, size = name, 0
        while previous:
            if len(names) == MAX_CHAIN:
                raise invalid("previous_response_id", f"has more than {MAX_CHAIN} responses before it", MAX_CHAIN)
            row = _row(connection, owner, previous, LENGTH.label("length"), field="previous_response_id")
            status = "failed" if self._is_lost(row) else row.status
            if status not in ("completed", "incomplete"):
                raise invalid("previous_response_id", f"{previous} is {status}")
            size += row.length
            if taken + size > max_size:
                raise too_large("previous_response_id", taken + size, max_size)
            names.append(previous)
            previous = row.previous
        return names, size

    async def items_size(self, owner: str, names: list[str]) -> int:
        """At most how many characters of JSON the result of ``items`` has; no item is loaded."""
        responses = sorted(_responses_of(names))

        def transaction(connection: Connection) -> int:
            lengths = (select(LENGTH).where(*_kept(owner, name)) for name in responses)
            return sum(connection.execute(length).scalar() or 0 for length in lengths)

        return await self._database.read(transaction) if responses else 0

    async def items(self, owner: str, names: list[str], taken: int, max_size: int) -> tuple[dict[str, Item], int]:
        """The items of the owner's responses, input and output, that have one of these ids, and their size in
        characters of JSON; other ids are left out.

        Args:
            taken, max_size: as for ``conversation``.

        Raises ``PenstockError`` (``too_large``) as ``conversation``.
        """
        wanted, responses = set(names), sorted(_responses_of(names))
        texts = cast(RESPONSES.c.input, Text), cast(OUTPUT, Text)

        def transaction(connection: Connection) -> tuple[dict[str, Item], int]:
            found: dict[str, Item] = {}
            size = 0
            for name in responses:
                for text in connection.execute(select(*texts).where(*_kept(owner, name))).first() or ():
                    for item in msgspec.json.decode(text, type=list[msgspec.Raw]):
                        if (item_id := _id_of(item)) in wanted:
                            size += len(memoryview(item))
                            if taken + size > max_size:
                                raise too_large("input", taken + size, max_size)
                            found[item_id] = msgspec.json.decode(item)
            return found, size

        return await self._database.read(transaction) if responses else ({}, 0)

    async def delete(self, owner: str, name: str) -> None:
        """Raises as ``get``."""

        def transaction(connection: Connection) -> None:
            _row(connection, owner, name)
            connection.execute(delete(RESPONSES).where(RESPONSES.c.id == name))

        await self._database.write(transaction)

    async def cancel(self, owner: str, name: str) -> Document:
        """Mark a background response as cancelled, if it has not ended; its process then stops computing it. Raises as
        ``get``."""

        def transaction(connection: Connection) -> Document:
            stored = self._current(_row(connection, owner, name, RESPONSES.c.document))
            if not stored["background"]:
                raise invalid("response_id", f"{name} is no background response, which alone can be cancelled")
            document = {**stored, "status": "cancelled"}
            values = {"document": document, "status": "cancelled"}
            changed = connection.execute(update(RESPONSES).where(*_pending(owner, name)).values(**values))
            return document if changed.rowcount else stored

        return await self._database.write(transaction)

    async def beat(self, owner: str, name: str) -> bool:
        """Say that a background response is being computed; returns whether it is still wanted."""

        def transaction(connection: Connection) -> bool:
            changed = connection.execute(update(RESPONSES).where(*_pending(owner, name)).values(beat=time.time()))
            return changed.rowcount > 0

        return await self._database.write(transaction)

    async def remove_expired(self) -> None:
        await self._database.delete_in_parts(RESPONSES, RESPONSES.c.expires < time.time())

    def _current(self, row: Row[Any]) -> Document:
        """A response, failed where its process has ended."""
        document: Document = row.document
        return {**document, "status": "failed", "error": LOST} if self._is_lost(row) else document

    def _is_lost(self, row: Row[Any]) -> bool:
        """Whether the process that computes a response has ended. A step of the clock, after which the times of all
        processes look old, is waited out."""
        lost = row.status in PENDING and time.time() - row.beat > LOST_AFTER
        offset, now = time.time() - time.monotonic(), time.monotonic()
        if abs(offset - self._clock_offset) > CLOCK_STEP:
            self._clock_stepped = now
        self._clock_offset = offset
        return lost and now - self._clock_stepped > LOST_AFTER


def _responses_of(items: list[str]) -> set[str]:
    """Ids of the responses that items with these ids would be of."""
    return {f"resp_{match[1]}" for item in items if (match := ITEM_ID.fullmatch(item))}


class _Id(msgspec.Struct):
    id: str = ""


def _id_of(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_Id).id


def _size(value: Any) -> int:
    """Bytes of its JSON."""
    return len(msgspec.json.encode(value))


def _pending(owner: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.status.in_(PENDING)


def _kept(owner: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.expires >= time.time()


def _row(
    connection: Connection, owner: str, name: str, *columns: ColumnElement[Any], field: str = "response_id"
) -> Row[Any]:
    """A response's status, beat and predecessor, and these columns. Raises ``PenstockError`` (``not_found``)."""
    responses = RESPONSES.c
    found = select(responses.status, responses.beat, responses.previous, *columns).where(*_kept(owner, name))
    if (row := connection.execute(found).first()) is None:
        raise PenstockError(Code.NOT_FOUND, f"{field}: there is no response {name[:160]!r}", field)
    return row
