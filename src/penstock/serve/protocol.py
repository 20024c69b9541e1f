"""HTTP/1.1 on a socket: uvicorn's protocol, with an end to a client's patience."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Protocol(HttpToolsProtocol):
    """Closes connections whose headers grow too large, do not come, or whose client does not read its answer."""

    client_timeout = 60.0
    """Seconds."""
    max_header_size = 64 * 2**10
    """Bytes."""

    _patience: asyncio.TimerHandle | None = None
    _head = 0
    """Bytes of the headers that are coming in; -1 once they are complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head >= 0:
            self._head += len(data)
            if self._head > self.max_header_size and not self.transport.is_closing():
                self.transport.write(TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        self._head = 0
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = -1
        self._stop_waiting()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def _wait(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(self.client_timeout, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        self.transport.abort()


def protocol(client_timeout: float, max_header_size: int) -> type[Protocol]:
    """A protocol with these limits."""
    limits: dict[str, Any] = {"client_timeout": client_timeout, "max_header_size": max_header_size}
    return type("Limited", (Protocol,), limits)
