"""HTTP/1.1 on a socket: uvicorn's protocol, with an end to what a client may send and to how long it may take."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = Patience()
        """While a request's headers come, and while the rest comes of one that is answered already."""
        self._writing = Patience()
        """While the client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading.start(self.client_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.stop()
        self._writing.stop()
        if self._active and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
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
        self._reading.stop()
        if len(self.url) + sum([len(name) + len(value) for name, value in self.headers]) > self.max_header_size:
            self._refuse()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body)
        self._body += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._in_head = False, True
        self._overhead = self._body = 0
        self._reading.stop()
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._in_message:
            self._reading.start(self.client_timeout, self.transport.abort)
        super().on_response_complete()

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
