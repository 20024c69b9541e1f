"""HTTP/1.1 on a socket: uvicorn's protocol, with an end to what a client may send and to how long it may take."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
PIPELINED = 8
"""Requests of a connection that wait while one is answered; what comes after them is not looked at until then."""
PIECE = 4096
"""Bytes looked at in one go where it is not known how many requests they hold."""
FRAMING = 16
"""Bytes of chunks' frames that a byte of a body may cost."""


class Patience:
    """Ends something unless it is stopped in time."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, end: Callable[[], None]) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, end)

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


class Flow(FlowControl):
    """Reads nothing more while there is something that was not looked at."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """Closes connections whose headers grow too large, do not come, or whose client does not read its answer."""

    client_timeout = 60.0
    """Seconds."""
    max_header_size = 64 * 2**10
    """Bytes."""

    _active: RequestResponseCycle | None = None
    """The request that is being answered; ``cycle`` is the newest, which may still wait for its turn."""
    _in_head = True
    _in_message = False
    _overhead = _body = 0
    """Bytes of the request at hand besides its body, and of its body."""
    _refused = False
    _left = 0
    """Bytes of the body at hand that have not come, where its length was told."""
    _unread, _at = b"", 0
    """What was received and not looked at, from ``_at`` on."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = Patience()
        """While a request's headers come, and while the rest comes of one that is answered already."""
        self._writing = Patience()
        """While the client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = Flow(transport)
        self._reading.start(self.client_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.stop()
        self._writing.stop()
        if self._active and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread, self._at = self._unread[self._at :] + data, 0
        self._look()

    def _look(self) -> None:
        """Take in what has come, one request's head or body after the other, until enough requests wait."""
        while self._at < len(self._unread) and len(self.pipeline) < PIPELINED and not self._refused:
            if self.transport.is_closing():
                return
            end = self._end()
            piece, self._at = self._unread[self._at : end], end
            self._take_in(piece)
        if self._at < len(self._unread):
            self._flow.held = True
            self.flow.pause_reading()
        elif self._unread:
            self._unread, self._at = b"", 0
            if self._flow.held:
                self._flow.held = False
                self.flow.resume_reading()

    def _end(self) -> int:
        """Of what is taken in next: of the head or the body at hand, or a piece."""
        start = self._at
        if self._left:
            return start + self._left
        if self._in_head and (end := self._unread.find(b"\r\n\r\n", start)) >= 0:
            return end + 4
        return start + PIECE

    def _take_in(self, data: bytes) -> None:
        if self._in_head:  # some clients offer HTTP/2 with every request, and httptools then drops the body
            head, gap, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"", head) + gap + rest
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > self.max_header_size + FRAMING * self._body:
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
        if self._unread:
            self.loop.call_soon(self._look)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing.start(self.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._writing.stop()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self) -> None:
        if not self._refused and not self.transport.is_closing():
            self._refused = True
            self.transport.write(TOO_LARGE)
            self.transport.close()


def protocol(client_timeout: float, max_header_size: int) -> type[Protocol]:
    """A protocol with these limits."""
    limits: dict[str, Any] = {"client_timeout": client_timeout, "max_header_size": max_header_size}
    return type("Limited", (Protocol,), limits)
