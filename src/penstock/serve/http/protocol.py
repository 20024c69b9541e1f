"""HTTP/1.1 on a socket: uvicorn's protocol with limits on size and duration of what a client sends and reads."""

from __future__ import annotations

import asyncio
import re
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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = Timeout()
        """Runs while headers arrive, and while the rest arrives of a request that is answered already."""
        self._writing = Timeout()
        """Runs while the client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = UnparsedFlowControl(transport)
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
        super()._start_asgi_task(cycle, app)

    def _refuse(self) -> None:
        if not self._refused and not self.transport.is_closing():
            self._refused = True
            self.transport.write(TOO_LARGE)
            self.transport.close()


def protocol(client_timeout: float, max_header_size: int) -> type[Protocol]:
    """The protocol class with these limits, for uvicorn's ``http=``."""
    limits: dict[str, Any] = {"client_timeout": client_timeout, "max_header_size": max_header_size}
    return type("Limited", (Protocol,), limits)
