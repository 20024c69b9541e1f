"""Stored responses of the Responses API."""

from __future__ import annotations

import re
import time
import zlib
from typing import Any, NamedTuple, NoReturn

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Text, cast, delete, func, insert, select, update

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .database import too_large
from .pages import Page, PageQuery
from .store import Store, reads, writes
from .tables import RESPONSE_EVENTS, RESPONSES

MAX_CHAIN = 1000
"""Maximum number of previous responses in a conversation."""
PENDING = ("queued", "in_progress")
ITEM_ID = re.compile(r"(?:rs|msg|fc|in)_(.{1,128})_[0-9]{1,9}")
"""Id of an item; the group is the id of its response without ``resp_``."""
LOST = {"code": "server_error", "message": "the process that computed the response has ended; send the request again"}
"""Error of a pending response that no process can continue: an earlier version of Penstock has stored no request."""

OUTPUT = RESPONSES.c.document["output"]
LENGTH = func.length(cast(RESPONSES.c.input, Text)) + func.length(cast(OUTPUT, Text))
"""SQL expression: size of a response's input and output items in characters of JSON."""
REQUEST_SIZE = func.coalesce(func.length(cast(RESPONSES.c.request, Text)), 0)
"""SQL expression: size of the request of a pending background response in characters of JSON."""
EVENT_END = b"\n\n"
Document = dict[str, Any]
"""A response object of OpenAI's API."""
Item = dict[str, Any]
NewEvents = tuple[int, bytes]
"""Sequence number of the last of consecutive events, and the encoded events."""
NO_EVENTS = -1, b""


class Lease(NamedTuple):
    """The right of an API process to compute a background response, which is not finished."""

    name: str
    """Id of the response."""
    owner: str
    worker: str
    """Id of the API process; empty: none computes the response."""
    beat: float
    """Number that changes while the process lives."""
    deaths: int
    """Number of processes that will have ended without finishing the response if ``worker`` has ended."""


class StoredRequest(NamedTuple):
    """A background response to be continued."""

    document: Document
    """The response object, without output."""
    request: dict[str, Any]
    """The request, with the items of the conversation before it."""
    input: list[Item]
    """Input items of the request itself."""
    deaths: int
    """Number of processes that have ended without finishing the response."""


class ResponseStore(Store):
    """Stores responses in the database."""

    @writes
    def add(
        self,
        connection: Connection,
        owner: str,
        document: dict[str, Any],
        items: list[Item],
        worker: str | None = None,
        request: dict[str, Any] | None = None,
    ) -> None:
        """Store a new response.

        Args:
            worker: id of the API process that computes the response in the background.
            request: request of a background response.

        Raises ``PenstockError`` as ``Quotas.check``.
        """
        size = _size(document) + _size(items)
        if request is not None:
            size += len(msgspec.json.encode(request).decode())
        self._quotas.check(connection, owner, "store", responses=1, bytes=size)
        values = {"id": document["id"], "owner": owner, "previous": document["previous_response_id"] or ""}
        kept = {"document": document, "status": document["status"], "input": items, "size": size}
        lease = {"worker": worker, "request": request, "beat": 0.0, "expires": time.time() + self._retention}
        connection.execute(insert(RESPONSES).values(**values, **kept, **lease))

    @reads
    def check_room(self, connection: Connection, owner: str) -> None:
        """Check that another response can be stored. Raises ``PenstockError`` as ``Quotas.check``."""
        self._quotas.check(connection, owner, "store", responses=1, bytes=1)

    @writes
    def advance(
        self, connection: Connection, owner: str, worker: str, document: dict[str, Any], events: NewEvents = NO_EVENTS
    ) -> bool:
        """Replace a pending background response, and store new events. Returns False if the response was cancelled or
        deleted, or another process has continued it."""
        size = _size(document) - _size(document | {"output": []})
        if not _change_pending(connection, owner, document["id"], {"document": document}, worker, size):
            return False
        self._add_events(connection, document["id"], events)
        return True

    @writes
    def add_events(self, connection: Connection, owner: str, worker: str, name: str, events: NewEvents) -> bool:
        """Store new events of a pending background response. Returns False as ``advance``."""
        if not _change_pending(connection, owner, name, {}, worker):
            return False
        self._add_events(connection, name, events)
        return True

    @reads
    def events(self, connection: Connection, owner: str, name: str, after: int) -> tuple[list[bytes], bool]:
        """Return the stored events of a response with sequence numbers above ``after``, and True if there will be no
        further ones. Raises ``PenstockError``: as ``get``; ``invalid`` if the response is not streamed."""
        row = _row(connection, owner, name, RESPONSES.c.request["stream"].as_boolean().label("stream"))
        events = RESPONSE_EVENTS.c
        found = select(events.last, events.data).where(events.response == name, events.last > after)
        result: list[bytes] = []
        for last, data in connection.execute(found.order_by(events.last)):
            some = _split_events(data)
            result += some[max(0, len(some) - (last - after)) :]
        ended = row.status not in PENDING or row.worker is None
        if ended and not result:
            any_event = select(events.last).where(events.response == name).limit(1)
            if connection.execute(any_event).first() is None:
                _refuse_stream(name)
        elif not ended and not row.stream:
            _refuse_stream(name)
        return result, ended

    # --- Leases of background responses -------------------------------------------------------------------------------

    @reads
    def leases(self, connection: Connection) -> list[Lease]:
        """Return the leases of all background responses that are not finished, the oldest first."""
        responses = RESPONSES.c
        columns = responses.id, responses.owner, responses.worker, responses.beat, responses.deaths
        found = select(*columns).where(responses.worker.is_not(None)).order_by(responses.expires)
        rows = connection.execute(found)
        return [Lease(row.id, row.owner, row.worker, row.beat, row.deaths + bool(row.worker)) for row in rows]

    @writes
    def beat(self, connection: Connection, worker: str) -> None:
        """Renew the leases of a process."""
        mine = update(RESPONSES).where(RESPONSES.c.worker == worker)
        connection.execute(mine.values(beat=RESPONSES.c.beat + 1))

    @writes
    def take_over(self, connection: Connection, lease: Lease, worker: str) -> StoredRequest | None:
        """Take the lease of a process that has ended or released it. Returns None if the lease has changed."""
        responses = RESPONSES.c
        where = responses.id == lease.name, responses.worker == lease.worker, responses.beat == lease.beat
        values = {"worker": worker, "beat": responses.beat + 1, "deaths": lease.deaths}
        if not connection.execute(update(RESPONSES).where(*where).values(**values)).rowcount:
            return None
        columns = responses.document, responses.request, responses.input
        row = connection.execute(select(*columns).where(responses.id == lease.name)).one()
        return StoredRequest(*row, lease.deaths)

    @writes
    def release(self, connection: Connection, worker: str) -> None:
        """Release the leases of a process that is stopping, so that other processes take them."""
        mine = update(RESPONSES).where(RESPONSES.c.worker == worker)
        connection.execute(mine.values(worker="", beat=RESPONSES.c.beat + 1))

    # --- Reading ------------------------------------------------------------------------------------------------------

    @reads
    def get(self, connection: Connection, owner: str, name: str) -> Document:
        """Return a response. Raises ``PenstockError`` (``not_found``) if the owner has no such response."""
        return _current(_row(connection, owner, name, RESPONSES.c.document))

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
            status = "failed" if _is_lost(row) else row.status
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
        connection.execute(delete(RESPONSE_EVENTS).where(RESPONSE_EVENTS.c.response == name))
        connection.execute(delete(RESPONSES).where(RESPONSES.c.id == name))

    @writes
    def cancel(self, connection: Connection, owner: str, name: str) -> Document:
        """Mark a pending background response as cancelled; its process then stops. Raises as ``get``."""
        stored = _current(_row(connection, owner, name, RESPONSES.c.document))
        if not stored["background"]:
            raise invalid("response_id", f"{name} is not a background response; only these can be cancelled")
        document = {**stored, "status": "cancelled"}
        return document if _change_pending(connection, owner, name, {"document": document}) else stored

    async def remove_expired(self) -> None:
        now = time.time()
        await self._database.delete_in_parts(RESPONSES, RESPONSES.c.expires < now)
        await self._database.delete_in_parts(RESPONSE_EVENTS, RESPONSE_EVENTS.c.expires < now)

    def _add_events(self, connection: Connection, name: str, events: NewEvents) -> None:
        last, encoded = events
        if not encoded:
            return
        data = zlib.compress(encoded)
        responses = RESPONSES.c
        this = update(RESPONSES).where(responses.id == name)
        connection.execute(this.values(size=responses.size + len(data)))
        expires = connection.execute(select(responses.expires).where(responses.id == name)).scalar_one()
        values = {"response": name, "last": last, "expires": expires, "data": data}
        connection.execute(insert(RESPONSE_EVENTS).values(**values))


def _current(row: Row[Any]) -> Document:
    """Return a response, marked as failed if no process can continue it."""
    document: Document = row.document
    return {**document, "status": "failed", "error": LOST} if _is_lost(row) else document


def _is_lost(row: Row[Any]) -> bool:
    return row.status in PENDING and row.worker is None


def _split_events(data: bytes) -> list[bytes]:
    """Split compressed events."""
    return [event + EVENT_END for event in zlib.decompress(data).split(EVENT_END)[:-1]]


def _refuse_stream(name: str) -> NoReturn:
    message = f"{name} has no stored events: only background responses created with stream: true can be streamed"
    raise invalid("stream", message)


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


def _change_pending(
    connection: Connection,
    owner: str,
    name: str,
    values: dict[str, Any],
    worker: str | None = None,
    more_bytes: int = 0,
) -> bool:
    """Update a pending background response. If its new document is finished, its lease ends and its request is removed.
    Returns False if no such response is pending.

    Args:
        worker: process that must have the lease; None: any.
        more_bytes: number of bytes by which the response grows.
    """
    responses = RESPONSES.c
    where = [responses.id == name, responses.owner == owner, responses.status.in_(PENDING)]
    where.append(responses.worker.is_not(None) if worker is None else responses.worker == worker)
    values = {**values, "size": responses.size + more_bytes}
    if document := values.get("document"):
        values["status"] = document["status"]
        if document["status"] not in PENDING:
            values |= {"worker": None, "request": None, "size": values["size"] - REQUEST_SIZE}
    return connection.execute(update(RESPONSES).where(*where).values(**values)).rowcount > 0


def _is_stored(owner: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return RESPONSES.c.id == name, RESPONSES.c.owner == owner, RESPONSES.c.expires >= time.time()


def _row(
    connection: Connection, owner: str, name: str, *columns: ColumnElement[Any], field: str = "response_id"
) -> Row[Any]:
    """Read status, worker, previous id and ``columns`` of a response. Raises ``PenstockError`` (``not_found``)."""
    responses = RESPONSES.c
    found = select(responses.status, responses.worker, responses.previous, *columns).where(*_is_stored(owner, name))
    if (row := connection.execute(found).first()) is None:
        raise PenstockError(
            Code.NOT_FOUND, f"{field}: the response {name[:160]!r} does not exist or has expired", field
        )
    return row
