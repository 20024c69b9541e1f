"""Settings, counters and the outbox, which both ends of a connection share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .buffer import TransferBuffer
from .connection import Connection
from .messages import Instance, Message, Start
from .nixl import NixlAgent
from .receiver import Arrived, Broken, Completed
from .sender import Cancelled, Sender, Sending

PROTOCOL = "penstock kv transfer 1"
"""Name and version of the protocol in the handshake."""
TICK_INTERVAL = 0.1
"""Seconds between checks for overdue answers."""

Event = Start | Cancelled | Arrived | Completed | Broken
"""Events for the engine: the first two on a prefill engine, the others on a decode engine."""


class KVTransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an endpoint."""

    secret: bytes
    """Secret of the cluster."""
    timeout: float
    """Seconds without a message from the peer after which a transfer fails, on either side."""
    listen: str = ""
    """Address (``host:port``) for connections of decode engines; port 0: any free port. Empty for a decode engine."""
    allow_fingerprint_mismatch: bool = False
    """Accept peers with another ``ModelInfo.fingerprint``, if they accept this engine's, too."""
    transport: Literal["auto", "tcp", "nixl"] = "auto"
    """Value of the option ``kv_transport``."""


class TransferStats(msgspec.Struct):
    """Counters since the start."""

    transfers: int = 0
    """Number of transfers started."""
    completed: int = 0
    """Number of transfers completed on a decode engine."""
    failed: int = 0
    """Number of transfers failed on a decode engine."""
    bytes_received: int = 0
    """Bytes of pieces received over any transport."""
    bytes_sent: int = 0
    """Bytes of pieces sent over TCP."""
    rereads: int = 0
    """Number of repeated reads of pieces."""
    checksum_failures: int = 0
    """Number of pieces received with a wrong checksum."""


@dataclass
class Context:
    """State shared by all connections of an engine."""

    instance: Instance
    buffer: TransferBuffer
    options: KVTransferOptions
    stats: TransferStats
    report: Callable[[list[Any]], None]
    """Callback that passes events to the engine, and clears the list."""
    nixl: NixlAgent | None = None
    """NIXL agent; None unless the transport is ``nixl``."""


class Outbox:
    """Queue of messages to send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[Message | Sending] = asyncio.Queue()

    def put(self, messages: list[Any]) -> None:
        """Queue messages, and clear the list."""
        for message in messages:
            self._queue.put_nowait(message)
        messages.clear()

    async def run(self, sender: Sender | None = None, context: Context | None = None) -> None:
        """Send messages until the connection is lost.

        Args:
            sender: sender whose pieces are sent, on a prefill engine.
        """
        try:
            while True:
                item = await self._queue.get()
                if not isinstance(item, Sending):
                    await self._connection.send(item)
                    continue
                assert sender is not None
                assert context is not None
                message = item.message
                try:
                    data = context.buffer.layers(item.slot, message.first_layer, message.last_layer)
                    await self._connection.send(message, data)
                finally:
                    sender.sent(item)
                context.stats.bytes_sent += message.size
        finally:
            while not self._queue.empty():
                if isinstance(item := self._queue.get_nowait(), Sending) and sender:
                    sender.sent(item)
