"""HTTP/1.1 on a socket: uvicorn's protocol with limits on size and duration of what a client sends and reads."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
MAX_PIPELINED = 8
"""Pipelined requests of a connection that are parsed while one is answered; later bytes stay unread."""
PARSE_SIZE = 4096
"""Bytes parsed at a time where the length of the message is not known."""
MAX_FRAMING = 16
"""Bytes of chunk framing allowed for each byte of a body."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
DRAIN_GRACE = 0.5
"""Seconds without a request after which a stopping server closes a connection: one that is under way is answered."""
HALF_CLOSED_GRACE, HALF_CLOSED_CHECK = 0.5, 0.25
"""Seconds after which a client that sends no more is asked whether it is there, and between two looks at that."""


class Timeout:
    """Calls ``end`` after some seconds unless it is stopped before."""

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
    """Does not resume reading while received bytes are not parsed."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """Closes a connection whose headers are too large or late, or whose client does not read its response."""

    client_timeout = 60.0
    """Seconds without progress."""
    max_header_size = 64 * 2**10
    """Bytes of all headers of a request."""
    draining = False
    """Of the class: whether the server stops, so that no connection is kept for further requests."""

    _active: RequestResponseCycle | None = None
    """The request being answered; ``cycle`` is the newest one, which may be queued behind it."""
    _in_head = True
    _in_message = False
    _overhead = _body = 0
    """Bytes of the current request outside its body, and of its body."""
    _refused = False
    _left = 0
    """Bytes of the current body that have not arrived, where it has a content-length."""
    _unread, _at = b"", 0
    """Received bytes; those from ``_at`` on are not parsed yet."""
    _half_closed = _probed = False
    """Whether the client sends no more, but may read; whether it has been sent something to find out."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = Timeout()
        """Runs while headers arrive, and while the rest arrives of a request that is answered already."""
        self._writing = Timeout()
        """Runs while the client does not read."""
        self._presence = Timeout()
        """Runs until the next look at a client that sends no more."""

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
        """The client sends no more: what it asked for before is answered, unless it has left altogether."""
        over_tls = self.transport.get_extra_info("sslcontext") is not None  # which cannot be half open in asyncio
        if over_tls or self._in_message or not self._busy:
            return None
        if not self._half_closed:
            self._half_closed = True
            self._presence.start(HALF_CLOSED_GRACE, self._probe)
        return True

    def shutdown(self) -> None:
        """Close the connection once nothing has been asked on it for ``DRAIN_GRACE``, as the server stops."""
        if not self._busy:
            left = self._idle_since + DRAIN_GRACE - self.loop.time()
            self.loop.call_later(max(left, 0.0), self._close_if_idle)

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered, or has begun to arrive."""
        waiting = self.cycle is not None and not self.cycle.response_complete
        return waiting or self._in_message or bool(self.pipeline or self._unread)

    def _close_if_idle(self) -> None:
        """Of a stopping server; a response that has ended in the meantime starts the time anew."""
        if not self._busy and not self.transport.is_closing() and self.loop.time() >= self._idle_since + DRAIN_GRACE:
            self.transport.close()

    def _probe(self) -> None:
        """Find out whether a client that sends no more still reads: one that does not answers a write with a reset,
        which shows at the next look. HTTP/1.1 lets a server write ``100 Continue`` before any response."""
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
        self._unread, self._at = self._unread[self._at :] + data, 0
        self._parse()

    def _parse(self) -> None:
        """Parse received bytes, one head or body at a time, until ``MAX_PIPELINED`` requests are queued."""
        while self._at < len(self._unread) and len(self.pipeline) < MAX_PIPELINED and not self._refused:
            if self.transport.is_closing():
                return
            end = self._end()
            piece, self._at = self._unread[self._at : end], end
            self._parse_piece(piece)
        if self._at < len(self._unread):
            self._flow.held = True
            self.flow.pause_reading()
        elif self._unread:
            self._unread, self._at = b"", 0
            if self._flow.held:
                self._flow.held = False
                self.flow.resume_reading()

    def _end(self) -> int:
        """Where the next piece to parse ends: the current head, the current body, or ``PARSE_SIZE`` bytes."""
        start = self._at
        if self._left:
            return start + self._left
        if self._in_head and (end := self._unread.find(b"\r\n\r\n", start)) >= 0:
            return end + 4
        return start + PARSE_SIZE

    def _parse_piece(self, data: bytes) -> None:
        if self._in_head:  # some clients send "Upgrade: h2c" with every request, and httptools then drops the body
            head, gap, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"", head) + gap + rest
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > self.max_header_size + MAX_FRAMING * self._body:
            self._refuse()
        elif not self._in_message and self.cycle and self.cycle.response_complete and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        self._in_message = True
        self._reading.start(self.client_timeout, self.transport.abort)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        length = dict(self.headers).get(b"content-length", b"")
        self._left = int(length) if length.isdigit() else 0
        self._reading.stop()
        if len(self.url) + sum([len(name) + len(value) for name, value in self.headers]) > self.max_header_size:
            self._refuse()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._left = max(self._left - len(body), 0)
        self._overhead -= len(body)
        self._body += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._in_head = False, True
        self._overhead = self._body = self._left = 0
        self._reading.stop()
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._in_message:
            self._reading.start(self.client_timeout, self.transport.abort)
        super().on_response_complete()
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
                """Say ``Connection: close`` where the server stops, with the last response that is asked for."""
                if self.draining and message["type"] == "http.response.start" and cycle is self.cycle:
                    cycle.keep_alive = cycle.keep_alive and bool(self._unread)
                await send(message)

            await app(scope, receive, send_last)

        super()._start_asgi_task(cycle, answer)

    def _refuse(self) -> None:
        if not self._refused and not self.transport.is_closing():
            self._refused = True
            self.transport.write(TOO_LARGE)
            self.transport.close()


def protocol(client_timeout: float, max_header_size: int) -> type[Protocol]:
    """The protocol class with these limits, for uvicorn's ``http=``."""
    limits: dict[str, Any] = {"client_timeout": client_timeout, "max_header_size": max_header_size}
    return type("Limited", (Protocol,), limits)
