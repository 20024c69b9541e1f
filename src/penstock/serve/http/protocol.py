"""HTTP/1.1 on a socket: uvicorn's protocol with strict framing, size limits and timeouts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.core import Code, Failure, PenstockError

from .framing import BARE_LINE_FEED, HEAD_END, Chunks, FramingError, check_head, substitute_head
from .request_record import REFUSED, Refused

MAX_PIPELINED = 8
"""Maximum number of pipelined requests that are parsed while a request is answered; further bytes stay unread."""
MAX_FRAMING = 16
"""Maximum bytes of chunk framing per byte of a body."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
DRAIN_GRACE = 0.5
"""Idle time in seconds after which a stopping server closes a connection, so that a request in transit is answered."""
LINGER = 1.0
"""Seconds in which a rejected client may send the rest of its request and read the error. An immediate close would
reset the connection."""
HALF_CLOSED_GRACE, HALF_CLOSED_CHECK = 0.5, 0.25
"""Seconds until a client that has half-closed its connection is probed, and interval of further probes."""


class Timeout:
    """Calls a function after a delay unless it is stopped before."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, end: Callable[[], None]) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, end)

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


class UnparsedFlowControl(FlowControl):
    """Flow control that does not resume reading while received bytes are still unparsed."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """Delimits messages (``framing``), and closes a connection if its headers are late, or its client does not read the
    response.

    A malformed or too large head reaches the application as a request with ``REFUSED`` in its scope, so that the error
    has the format of the dialect and is logged. It is the last request of its connection.
    """

    client_timeout = 60.0
    """Maximum time in seconds without progress of a client."""
    max_header_size = 64 * 2**10
    """Maximum size of a request's head in bytes."""
    draining = False
    """Set on the class when the server stops: no connection is kept open for further requests."""

    _active: RequestResponseCycle | None = None
    """The request being answered. ``cycle`` is the newest request, which may still be queued."""
    _in_message = False
    """True while a request is arriving."""
    _in_body = False
    _chunks: Chunks | None = None
    """Decoder of the current body if it is chunked."""
    _left = 0
    """Number of bytes of the current body that have not arrived, if it has a Content-Length."""
    _searched = 0
    """Number of bytes of an incomplete head that were already searched for its end."""
    _overhead = _body = 0
    """Number of framing bytes, and of body bytes, of the current chunked body."""
    _last = False
    """True if no further request of this connection is read: further bytes are dropped."""
    _refused: Refused | None = None
    """Reason why the last request's head was rejected."""
    _broken: Failure | None = None
    """Reason why the last request's body is malformed."""
    _unread, _at = b"", 0
    """Received bytes, and the index of the first unparsed byte."""
    _half_closed = False
    """True if the client has closed its sending side; the client may still read."""
    _probed = False
    """True if ``100 Continue`` was sent to find out whether a half-closed client still reads."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = Timeout()
        """Timeout that runs while headers arrive, and while the rest of an already answered request arrives."""
        self._writing = Timeout()
        """Timeout that runs while the client does not read."""
        self._presence = Timeout()
        """Timeout that runs until the next probe of a half-closed client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = UnparsedFlowControl(transport)
        self._reading.start(self.client_timeout, self.transport.abort)
        self._idle_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.stop()
        self._writing.stop()
        self._presence.stop()
        if self._active and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of the client's data: continue to answer its open requests unless it has disconnected."""
        over_tls = self.transport.get_extra_info("sslcontext") is not None  # asyncio does not support half-closed TLS
        if over_tls or self._in_message or not self._busy:
            return None
        if not self._half_closed:
            self._half_closed = True
            self._presence.start(HALF_CLOSED_GRACE, self._probe)
        return True

    def shutdown(self) -> None:
        """Close the connection once it has been idle for ``DRAIN_GRACE`` seconds. Called when the server stops."""
        if not self._busy:
            left = self._idle_since + DRAIN_GRACE - self.loop.time()
            self.loop.call_later(max(left, 0.0), self._close_if_idle)

    @property
    def _busy(self) -> bool:
        """True if a request is being answered or is arriving."""
        waiting = self.cycle is not None and not self.cycle.response_complete
        return waiting or self._in_message or bool(self.pipeline or self._unread)

    def _close_if_idle(self) -> None:
        """Close an idle connection of a stopping server. A response that ended in the meantime restarts the delay."""
        if not self._busy and not self.transport.is_closing() and self.loop.time() >= self._idle_since + DRAIN_GRACE:
            self.transport.close()

    def _probe(self) -> None:
        """Find out whether a half-closed client still reads. If not, it answers a write with a reset, which the next
        probe detects. HTTP/1.1 allows a server to send ``100 Continue`` before any response."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        active = self._active
        if active and not active.response_started and active.scope["http_version"] == "1.1" and not self._probed:
            self._probed = True
            self.transport.write(CONTINUE)
        self._presence.start(HALF_CLOSED_CHECK, self._probe)

    def data_received(self, data: bytes) -> None:
        if not self._last:
            self._unread, self._at = self._unread[self._at :] + data, 0
            self._parse()

    def _parse(self) -> None:
        """Parse received bytes, one head or body at a time, until ``MAX_PIPELINED`` requests are queued."""
        self._unset_keepalive_if_required()
        while self._at < len(self._unread) and len(self.pipeline) < MAX_PIPELINED and not self._last:
            if self.transport.is_closing():
                return
            start = self._at
            try:
                self._parse_body() if self._in_body else self._parse_head()
            except FramingError as error:
                self._refuse_body(str(error)) if self._in_body else self._refuse_head(error)
            if self._at == start:
                break
        if self._last:
            self._unread, self._at = b"", 0
        if self._at < len(self._unread) and len(self.pipeline) >= MAX_PIPELINED:
            self._flow.held = True
            self.flow.pause_reading()
        else:
            self._unread, self._at = self._unread[self._at :], 0
            if self._flow.held:
                self._flow.held = False
                self.flow.resume_reading()
        if not self._busy and self.cycle and not self.transport.is_closing():  # the body has ended after its response
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _parse_head(self) -> None:
        """Parse the next head if it has arrived completely, so that the result does not depend on packet sizes."""
        while self._unread.startswith(b"\r\n", self._at):  # RFC 9112, 2.2: empty lines before a request
            self._at += 2
        start, limit = self._at, self.max_header_size
        if start == len(self._unread):
            return
        if not self._in_message:
            self._in_message = True
            self._searched = 0
            self._reading.start(self.client_timeout, self.transport.abort)
        searched = start + max(self._searched - len(HEAD_END), 0)
        end = self._unread.find(HEAD_END, searched)
        size = (len(self._unread) if end < 0 else end + len(HEAD_END)) - start
        if size > limit:
            raise FramingError(f"headers: must have at most {limit} bytes", 431)
        if BARE_LINE_FEED.search(self._unread, searched, start + size):
            raise FramingError("headers: a line does not end with CR LF")
        if end < 0:
            self._searched = size
            return
        head = check_head(self._unread[start : start + size])
        self._in_body = True
        self._left, self._chunks = head.length, Chunks() if head.chunked else None
        self._at += size
        try:
            self.parser.feed_data(head.raw)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._in_body, self._at = False, start
            raise FramingError(f"the request cannot be read: {error}") from error
        self._check_agreement()

    def _parse_body(self) -> None:
        if self._chunks:
            data, end = self._chunks.take(self._unread, self._at)
            self._overhead += end - self._at
        else:
            end = min(self._at + self._left, len(self._unread))
            data = self._unread[self._at : end]
            self._left -= len(data)
        self._at = end
        if data:
            try:
                self.parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                raise FramingError(f"body: the chunked encoding is malformed: {error}") from error
        if self._overhead > self.max_header_size + MAX_FRAMING * self._body:
            raise FramingError(f"body: the chunked encoding has more than {MAX_FRAMING} bytes of framing per byte")
        self._check_agreement()

    def _check_agreement(self) -> None:
        """Check that httptools and ``framing`` agree whether the request has ended."""
        ended = self._chunks.ended if self._chunks else not self._left
        if ended == self._in_message:
            raise FramingError("body: its end is ambiguous: check Content-Length or the chunked encoding")
        self._in_body = not ended

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._refused:
            cast(dict[str, Any], self.scope)[REFUSED] = self._refused

    def on_headers_complete(self) -> None:
        self._reading.stop()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body) if self._chunks else 0
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._overhead = self._body = 0
        self._reading.stop()
        self._last = self._last or not self.cycle.keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._in_message:
            self._reading.start(self.client_timeout, self.transport.abort)
        super().on_response_complete()
        if self._is_refused and self.cycle.response_complete:
            self._linger()
        self._idle_since = self.loop.time()
        if not self._busy and not self.transport.is_closing():
            if self._half_closed:
                self.transport.close()
            elif self.draining:
                self.loop.call_later(DRAIN_GRACE, self._close_if_idle)
        if self._unread:
            self.loop.call_soon(self._parse)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing.start(self.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._writing.stop()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_last(message: Any) -> None:
                """Close the connection after the last response if the server stops or the request was rejected."""
                if self.draining and message["type"] == "http.response.start" and cycle is self.cycle:
                    cycle.keep_alive = cycle.keep_alive and bool(self._unread)
                if self._is_refused and cycle is self.cycle and message["type"] == "http.response.body":
                    cycle.keep_alive = True  # Connection: close was sent; _linger closes
                await send(message)

            async def receive_checked() -> Any:
                """Receive the next message. Raises ``PenstockError`` (``invalid``) if the body is malformed."""
                message = await receive()
                if self._broken and cycle is self.cycle and message["type"] == "http.request":
                    raise PenstockError.of(self._broken)
                return message

            await app(scope, receive_checked, send_last)

        super()._start_asgi_task(cycle, answer)

    @property
    def _is_refused(self) -> bool:
        """True if the last request was rejected because of its head or body."""
        return self._refused is not None or self._broken is not None

    def _linger(self) -> None:
        """End the connection after the error response: drop further input, then close."""
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._reading.start(LINGER, self.transport.close)

    def _refuse_head(self, error: FramingError) -> None:
        """Pass a substitute head to the application, which answers it with the error."""
        self._last = True
        code = Code.TOO_LARGE if error.status == 431 else Code.INVALID
        self._refused = Refused(Failure(code, str(error)), error.status)
        self.parser = httptools.HttpRequestParser(self)
        head, _, _ = self._unread[self._at : self._at + self.max_header_size].partition(HEAD_END)
        self.parser.feed_data(substitute_head(head))

    def _refuse_body(self, message: str) -> None:
        """Make reading the body fail in the application, and close the connection after the response."""
        self._last, self._in_message = True, False
        self._broken = Failure(Code.INVALID, message, "body")
        self._reading.stop()
        self.cycle.keep_alive = False
        self.cycle.message_event.set()
        if self.cycle.response_complete:
            self.transport.close()


def protocol(client_timeout: float, max_header_size: int) -> type[Protocol]:
    """Return the protocol class with these limits, for uvicorn's ``http=``."""
    limits: dict[str, Any] = {"client_timeout": client_timeout, "max_header_size": max_header_size}
    return type("Limited", (Protocol,), limits)
