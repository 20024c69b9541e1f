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
from .store import Store, reads, writes
from .tables import RESPONSES
from .usage import Quotas

MAX_CHAIN = 1000
"""Maximum number of previous responses in a conversation."""
LOST_AFTER = 30.0
"""Seconds without a heartbeat after which a pending response is reported as failed."""
PENDING = ("queued", "in_progress")
ITEM_ID = re.compile(r"(?:rs|msg|fc|in|mcp[lr]?)_(.{1,128})_[0-9]{1,9}")
"""Id of an item; the group is the id of its response without ``resp_``."""
LOST = {"code": "server_error", "message": "the process that computed the response has ended; send the request again"}

OUTPUT = RESPONSES.c.document["output"]
LENGTH = func.length(cast(RESPONSES.c.input, Text)) + func.length(cast(OUTPUT, Text))
"""SQL expression: size of a response's input and output items in characters of JSON."""
CLOCK_STEP = 5.0
"""Minimum change of the system clock in seconds that is treated as a clock step (clock set, or machine suspended)."""
Document = dict[str, Any]
"""A response object of OpenAI's API."""
Item = dict[str, Any]


class ResponseStore(Store):
    """Stores responses in the database."""

    def __init__(self, database: Database, retention: float, quotas: Quotas) -> None:
        super().__init__(database, retention, quotas)
        self._clock_offset = time.time() - time.monotonic()
        """Offset between system and monotonic clock at the last check, in seconds."""
        self._clock_stepped = -math.inf
        """Time of the last detected clock step, on the monotonic clock."""

    @writes
    def add(self, connection: Connection, owner: str, document: dict[str, Any], items: list[Item]) -> None:
        """Store a new response. Raises ``PenstockError`` as ``Quotas.check``."""
        now, size = time.time(), _size(document) + _size(items)
        self._quotas.check(connection, owner, "store", responses=1, bytes=size)
        values = {"id": document["id"], "owner": owner, "previous": document["previous_response_id"] or ""}
        times = {"expires": now + self._retention, "beat": now}
        kept = {"document": document, "status": document["status"], "input": items, "size": size}
        connection.execute(insert(RESPONSES).values(**values, **times, **kept))

    @reads
    def check_room(self, connection: Connection, owner: str) -> None:
        """Check that another response can be stored. Raises ``PenstockError`` as ``Quotas.check``."""
        self._quotas.check(connection, owner, "store", responses=1, bytes=1)

    @writes
    def advance(self, connection: Connection, owner: str, document: dict[str, Any]) -> bool:
        """Replace a pending background response. Returns False if it was cancelled or deleted."""
        size = RESPONSES.c.size + _size(document) - _size(document | {"output": []})
        values = {"document": document, "status": document["status"], "beat": time.time(), "size": size}
        return _change_pending(connection, owner, document["id"], values)

    @reads
    def get(self, connection: Connection, owner: str, name: str) -> Document:
        """Return a response. Raises ``PenstockError`` (``not_found``) if the owner has no such response."""
        return self._current(_row(connection, owner, name, RESPONSES.c.document))

    @reads
    def input_page(self, connection: Connection, owner: str, name: str, query: PageQuery) -> Page:
        """Return a page of a response's input; only its items are decoded. Raises as ``get``."""
        row = _row(connection, owner, name, cast(RESPONSES.c.input, Text).label("input"))
        items = msgspec.json.decode(row.input, type=list[msgspec.Raw])
        order = items if query.ascending else items[::-1]
        if query.after:
            found = (i for i, item in enumerate(order, 1) if _id_of(item) == query.after)
            order = order[next(found, len(order)) :]
        return Page([msgspec.json.decode(item) for item in order[: query.limit]], len(order) > query.limit)

    @reads
    def conversation_size(self, connection: Connection, owner: str, name: str, taken: int, max_size: int) -> int:
        """Return the size of the result of ``conversation`` in characters of JSON, without loading it. Arguments and
        errors as ``conversation``."""
        return self._chain(connection, owner, name, taken, max_size)[1]

    @reads
    def conversation(self, connection: Connection, owner: str, name: str, taken: int, max_size: int) -> list[Item]:
        """Return the input and output items of a response and all previous responses, oldest first.

        Args:
            taken: size of the request without these items in bytes.
            max_size: maximum size of the request with these items in bytes.

        Raises ``PenstockError``: ``not_found``; ``invalid`` if a response is not finished, or has more than
        ``MAX_CHAIN`` previous responses; ``too_large`` if the request exceeds ``max_size``.
        """
        items: list[Item] = []
        for response in reversed(self._chain(connection, owner, name, taken, max_size)[0]):
            row = _row(connection, owner, response, RESPONSES.c.input, OUTPUT.label("output"))
            items += row.input + row.output
        return items

    def _chain(self, connection: Connection, owner: str, name: str, taken: int, max_size: int) -> tuple[list[str], int]:
        """Return the ids of a response and all previous responses, latest first, and their total size in characters of
        JSON."""
        names: list[str] = []
        previous, size = name, 0
        while previous:
            if len(names) == MAX_CHAIN:
                message = f"has more than {MAX_CHAIN} previous responses: start a new conversation"
                raise invalid("previous_response_id", message, MAX_CHAIN)
            row = _row(connection, owner, previous, LENGTH.label("length"), field="previous_response_id")
            status = "failed" if self._is_lost(row) else row.status
            if status not in ("completed", "incomplete"):
                message = f"{previous} is {status}; only completed and incomplete responses can be continued"
                raise invalid("previous_response_id", message)
            size += row.length
            if taken + size > max_size:
                raise too_large("previous_response_id", taken + size, max_size)
            names.append(previous)
            previous = row.previous
        return names, size

    async def items_size(self, owner: str, names: list[str]) -> int:
        """Return an upper bound of the size of the result of ``items``, in characters of JSON, without loading it."""
        responses = sorted(_responses_of(names))

        def transaction(connection: Connection) -> int:
            lengths = (select(LENGTH).where(*_is_stored(owner, name)) for name in responses)
            return sum(connection.execute(length).scalar() or 0 for length in lengths)

        return await self._database.read(transaction) if responses else 0

    async def items(self, owner: str, names: list[str], taken: int, max_size: int) -> tuple[dict[str, Item], int]:
        """Return the input and output items with these ids in the owner's responses, and their size in characters of
        JSON. Unknown ids are ignored. ``taken``, ``max_size`` and ``too_large`` as in ``conversation``."""
        wanted, responses = set(names), sorted(_responses_of(names))
        texts = cast(RESPONSES.c.input, Text), cast(OUTPUT, Text)

        def transaction(connection: Connection) -> tuple[dict[str, Item], int]:
            found: dict[str, Item] = {}
            size = 0
            for name in responses:
                for text in connection.execute(select(*texts).where(*_is_stored(owner, name))).first() or ():
                    for item in msgspec.json.decode(text, type=list[msgspec.Raw]):
                        if (item_id := _id_of(item)) in wanted:
                            size += len(memoryview(item))
                            if taken + size > max_size:
                                raise too_large("input", taken + size, max_size)
                            found[item_id] = msgspec.json.decode(item)
            return found, size

        return await self._database.read(transaction) if responses else ({}, 0)

    @writes
    def delete(self, connection: Connection, owner: str, name: str) -> None:
        """Delete a response. Raises as ``get``."""
        _row(connection, owner, name)
        connection.execute(delete(RESPONSES).where(RESPONSES.c.id == name))

    @writes
    def cancel(self, connection: Connection, owner: str, name: str) -> Document:
        """Mark a pending background response as cancelled; its process then stops. Raises as ``get``."""
        stored = self._current(_row(connection, owner, name, RESPONSES.c.document))
        if not stored["background"]:
            raise invalid("response_id", f"{name} is not a background response; only these can be cancelled")
        document = {**stored, "status": "cancelled"}
        changed = _change_pending(connection, owner, name, {"document": document, "status": "cancelled"})
        return document if changed else stored

    @writes
    def beat(self, connection: Connection, owner: str, name: str) -> bool:
        """Record a heartbeat of a background response. Returns False if it is no longer pending."""
        return _change_pending(connection, owner, name, {"beat": time.time()})

    async def remove_expired(self) -> None:
        await self._database.delete_in_parts(RESPONSES, RESPONSES.c.expires < time.time())

    def _current(self, row: Row[Any]) -> Document:
        """Return a response, marked as failed if its process has ended."""
        document: Document = row.document
        return {**document, "status": "failed", "error": LOST} if self._is_lost(row) else document

    def _is_lost(self, row: Row[Any]) -> bool:
        """Check whether the process that computes a response has ended. After a clock step, when all heartbeats may
        seem old, ``LOST_AFTER`` seconds must pass first."""
        lost = row.status in PENDING and time.time() - row.beat > LOST_AFTER
        offset, now = time.time() - time.monotonic(), time.monotonic()
        if abs(offset - self._clock_offset) > CLOCK_STEP:
            self._clock_stepped = now
        self._clock_offset = offset
        return lost and now - self._clock_stepped > LOST_AFTER


def _responses_of(items: list[str]) -> set[str]:
    """Ids of the responses to which items with these ids belong."""
    return {f"resp_{match[1]}" for item in items if (match := ITEM_ID.fullmatch(item))}


class _Id(msgspec.Struct):
    id: str = ""


def _id_of(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_Id).id


def _size(value: Any) -> int:
    """Size of a value's JSON in bytes."""
    return len(msgspec.json.encode(value))


def _change_pending(connection: Connection, owner: str, name: str, values: dict[str, Any]) -> bool:
    """Update a pending response. Returns False if no such response is pending."""
    where = RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.status.in_(PENDING)
    return connection.execute(update(RESPONSES).where(*where).values(**values)).rowcount > 0


def _is_stored(owner: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.expires >= time.time()


def _row(
    connection: Connection, owner: str, name: str, *columns: ColumnElement[Any], field: str = "response_id"
) -> Row[Any]:
    """Read status, heartbeat, previous id and ``columns`` of a response. Raises ``PenstockError`` (``not_found``)."""
    responses = RESPONSES.c
    found = select(responses.status, responses.beat, responses.previous, *columns).where(*_is_stored(owner, name))
    if (row := connection.execute(found).first()) is None:
        raise PenstockError(
            Code.NOT_FOUND, f"{field}: the response {name[:160]!r} does not exist or has expired", field
        )
    return row
