"""What both ends of a connection share: settings, counters, and how messages are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .buffer import TransferBuffer
from .connection import Connection
from .messages import (
    Instance,
    Message,
    Start,
)
from .nixl import NixlAgent
from .receiver import Arrived, Broken, Completed
from .sender import Cancelled, Sender, Sending

PROTOCOL = "penstock kv transfer 1"
TICK_INTERVAL = 0.1
"""Seconds between two looks at what is overdue."""

Event = Start | Cancelled | Arrived | Completed | Broken


class KVTransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an endpoint."""

    secret: bytes
    """The cluster's."""
    timeout: float
    """Seconds without an answer after which a transfer has failed on either side."""
    listen: str = ""
    """``host:port`` that decode engines connect to; port 0 is any free one. Empty for a decode engine."""
    allow_fingerprint_mismatch: bool = False
    transport: Literal["auto", "tcp", "nixl"] = "auto"
    """The option ``kv_transport``."""


class TransferStats(msgspec.Struct):
    """Counters since the start."""

    transfers: int = 0
    """Transfers begun."""
    completed: int = 0
    failed: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    """Over TCP."""
    rereads: int = 0
    """Pieces that were read again."""
    checksum_failures: int = 0


@dataclass
class Context:
    """What all connections of an engine share."""

    instance: Instance
    buffer: TransferBuffer
    options: KVTransferOptions
    stats: TransferStats
    report: Callable[[list[Any]], None]
    """Passes events to the engine, and empties the list."""
    nixl: NixlAgent | None = None
    """With the transport ``nixl``."""


class Outbox:
    """Sends messages one after the other."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[Message | Sending] = asyncio.Queue()

    def put(self, messages: list[Any]) -> None:
        """Send messages, and empty the list."""
        for message in messages:
            self._queue.put_nowait(message)
        messages.clear()

    async def run(self, sender: Sender | None = None, context: Context | None = None) -> None:
        """Send until the connection is lost.

        Args:
            sender: whose pieces are sent.
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
