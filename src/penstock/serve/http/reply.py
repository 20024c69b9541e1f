"""Responses: JSON documents, and streamed answers that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.config.secrets import mask_values
from penstock.core import Code, Failure, PenstockError

from .error_format import ErrorFormat
from .request_record import RequestRecord, record_of
from .status import headers
from .unexpected import unexpected

logger = logging.getLogger(__name__)

CLIENT_DISCONNECTED = Failure(Code.CANCELLED, "the client disconnected")
SERVER_SENT_EVENTS = b"text/event-stream; charset=utf-8"
WAITING = b": waiting\n\n"
"""Comment in a stream whose request waits to continue after the loss of its engine, so that proxies keep it open."""
COMMENT_INTERVAL = 5.0
"""Seconds between two such comments."""
DONE = b"data: [DONE]\n\n"
"""Last event of a stream in OpenAI's API."""
encode = msgspec.json.Encoder().encode


def event(document: object) -> bytes:
    """Format a server-sent event."""
    return b"data: " + encode(document) + b"\n\n"


def named_event(kind: str, document: object) -> bytes:
    """Format a server-sent event with a type."""
    return b"event: " + kind.encode() + b"\n" + event(document)


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def __init__(self, document: object, status: int = 200) -> None:
        super().__init__(encode(document), status)


class RequestLimiter(Protocol):
    """Counts and limits open requests."""

    def admit(self) -> AbstractContextManager[None]:
        """Context manager that counts a request as open. Raises ``PenstockError`` (``overloaded``) if too many requests
        are open."""
        ...


class Handler(Protocol):
    """Handler of one request of a dialect."""

    def full(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as one JSON document."""
        ...

    def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        ...


class Reply(Response):
    """Sends the chunks of an answer; status 200 is sent with the first chunk.

    A failure before the first chunk becomes an error response; a later failure becomes the last event of the stream.

    Args:
        streamed: the chunks are a stream; otherwise there is one chunk, a JSON document.
        media_type: media type of a stream.
    """

    def __init__(
        self,
        service: RequestLimiter,
        chunks: AsyncGenerator[bytes, None],
        error_format: ErrorFormat,
        streamed: bool,
        media_type: bytes = SERVER_SENT_EVENTS,
    ) -> None:
        super().__init__()
        self._service = service
        self._chunks = chunks
        self._error_format = error_format
        self._streamed = streamed
        self._media_type = media_type
        self._next_comment: asyncio.TimerHandle | None = None
        self._num_engines = 0
        """Number of ``RequestRecord.changed_engines`` that a comment or the header has named."""

    @classmethod
    def of(
        cls,
        service: RequestLimiter,
        handler: Handler,
        error_format: ErrorFormat,
        streamed: bool | None,
        media_type: bytes = SERVER_SENT_EVENTS,
    ) -> Reply:
        """Create the reply of a handler; ``streamed`` is the request's field ``stream``."""
        chunks = handler.stream() if streamed else handler.full()
        return cls(service, chunks, error_format, bool(streamed), media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, task, disconnected = record_of(scope), asyncio.current_task(), False
        assert task is not None

        def on_disconnect(watcher: asyncio.Task[None]) -> None:
            nonlocal disconnected
            if not watcher.cancelled():
                disconnected = True
                task.cancel()

        watcher = asyncio.create_task(_disconnected(receive))
        watcher.add_done_callback(on_disconnect)
        try:
            record.failure = await self._run(send, record)
        except asyncio.CancelledError:
            if not disconnected:
                raise
            task.uncancel()
            record.failure = CLIENT_DISCONNECTED
        finally:
            if self._next_comment:
                self._next_comment.cancel()
            watcher.remove_done_callback(on_disconnect)
            watcher.cancel()

    def _comment_later(self, send: Send, record: RequestRecord) -> None:
        """Send ``WAITING`` every ``COMMENT_INTERVAL`` while the request waits for an engine."""

        def comment() -> None:
            if record.is_waiting:
                message = {"type": "http.response.body", "body": WAITING, "more_body": True}
                self._comment = asyncio.ensure_future(send(message))
            self._comment_later(send, record)

        self._next_comment = asyncio.get_running_loop().call_later(COMMENT_INTERVAL, comment)

    async def _run(self, send: Send, record: RequestRecord) -> Failure | None:
        started = False
        try:
            with self._service.admit():
                async with aclosing(self._chunks) as chunks:
                    async for chunk in chunks:
                        if not started:
                            started = True
                            self._num_engines = len(record.changed_engines)
                            await send(self._start(200, None if self._streamed else chunk))
                            if self._streamed and self._media_type == SERVER_SENT_EVENTS:
                                self._comment_later(send, record)
                        if self._streamed and self._media_type == SERVER_SENT_EVENTS:
                            chunk = self._new_engines(record) + chunk
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return None
        except PenstockError as error:
            failure = error.failure
        except Exception as error:
            failure = unexpected(error)
        if started:
            body = self._error_format.stream_error(without_secrets(failure))
            await send({"type": "http.response.body", "body": body})
        else:
            await refuse(send, failure, self._error_format)
        return failure

    def _new_engines(self, record: RequestRecord) -> bytes:
        """Comments that name the engines on which the request has continued since the last call, although their results
        may differ."""
        new = list(record.changed_engines)[self._num_engines :]
        self._num_engines += len(new)
        return b"".join(f": resumed across: {engine}\n\n".encode() for engine in new)

    def _start(self, status: int, document: bytes | None) -> Message:
        kind = (b"content-type", b"application/json" if document is not None else self._media_type)
        more = (
            (b"content-length", str(len(document)).encode())
            if document is not None
            else (b"cache-control", b"no-cache")
        )
        return {"type": "http.response.start", "status": status, "headers": [kind, more]}


async def refuse(
    send: Send,
    failure: Failure,
    error_format: ErrorFormat,
    status: int | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Send an error response. ``status`` overrides the format's status; ``more``: additional headers."""
    body = error_format.error(without_secrets(failure))
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers(failure), **(more or {})}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status or error_format.status(failure), "headers": raw})
    await send({"type": "http.response.body", "body": body})


def without_secrets(failure: Failure) -> Failure:
    """Mask the server's secrets in the failure's message, which may quote a library's error."""
    message = mask_values(failure.message)
    return failure if message == failure.message else msgspec.structs.replace(failure, message=message)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected, or has sent a malformed rest of the body."""
    with suppress(PenstockError):
        while (await receive())["type"] != "http.disconnect":
            pass
