"""Responses: documents, server-sent events, and generated bodies, which are cancelled when the client disconnects."""

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
from .request_record import record_of
from .status import headers
from .unexpected import unexpected

logger = logging.getLogger(__name__)

CLIENT_DISCONNECTED = Failure(Code.CANCELLED, "the client disconnected")
SERVER_SENT_EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
"""The last event of a stream in OpenAI's API."""
encode = msgspec.json.Encoder().encode


def event(document: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(document) + b"\n\n"


def named_event(kind: str, document: object) -> bytes:
    """One server-sent event with its type."""
    return b"event: " + kind.encode() + b"\n" + event(document)


class Json(Response):
    """A document as JSON."""

    media_type = "application/json"

    def __init__(self, document: object, status: int = 200) -> None:
        super().__init__(encode(document), status)


class RequestLimiter(Protocol):
    """Counts and limits open requests."""

    def admit(self) -> AbstractContextManager[None]:
        """Context manager to be entered while a request is open. Raises ``PenstockError`` (``overloaded``) where too
        many are."""
        ...


class Handler(Protocol):
    """One request of a dialect."""

    def full(self) -> AsyncGenerator[bytes, None]:
        """The answer as one JSON document."""
        ...

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        ...


class Reply(Response):
    """Sends what ``pieces`` yields, with status 200 once the first piece is there.

    A failure before the first piece becomes an error response, a later one the last event of the stream.

    Args:
        streamed: whether pieces are a stream; otherwise the only one is a JSON document.
        media_type: of a stream; by default server-sent events.
    """

    def __init__(
        self,
        service: RequestLimiter,
        pieces: AsyncGenerator[bytes, None],
        error_format: ErrorFormat,
        streamed: bool,
        media_type: bytes = SERVER_SENT_EVENTS,
    ) -> None:
        super().__init__()
        self._service = service
        self._pieces = pieces
        self._error_format = error_format
        self._streamed = streamed
        self._media_type = media_type

    @classmethod
    def of(
        cls,
        service: RequestLimiter,
        handler: Handler,
        error_format: ErrorFormat,
        streamed: bool | None,
        media_type: bytes = SERVER_SENT_EVENTS,
    ) -> Reply:
        """The reply of a handler: a stream where the request has ``stream``."""
        pieces = handler.stream() if streamed else handler.full()
        return cls(service, pieces, error_format, bool(streamed), media_type)

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
            record.failure = await self._run(send)
        except asyncio.CancelledError:
            if not disconnected:
                raise
            task.uncancel()
            record.failure = CLIENT_DISCONNECTED
        finally:
            watcher.remove_done_callback(on_disconnect)
            watcher.cancel()

    async def _run(self, send: Send) -> Failure | None:
        started = False
        try:
            with self._service.admit():
                async with aclosing(self._pieces) as pieces:
                    async for piece in pieces:
                        if not started:
                            started = True
                            await send(self._start(200, None if self._streamed else piece))
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
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
    """Send an error response, by default with the format's own status; ``more`` are further headers."""
    body = error_format.error(without_secrets(failure))
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers(failure), **(more or {})}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status or error_format.status(failure), "headers": raw})
    await send({"type": "http.response.body", "body": body})


def without_secrets(failure: Failure) -> Failure:
    """The failure with the server's secrets masked in its message, which may quote a library's error."""
    message = mask_values(failure.message)
    return failure if message == failure.message else msgspec.structs.replace(failure, message=message)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected, or the rest of its body is malformed."""
    with suppress(PenstockError):
        while (await receive())["type"] != "http.disconnect":
            pass
