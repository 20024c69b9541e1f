"""A connection between two engines: framed messages over a socket, in an asyncio event loop.

A frame is the length of a message (4 bytes, little-endian) and the message. After a message ``Data``, the bytes of the
piece (``messages.Piece``) follow.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec
from xxhash import xxh3_64

from .messages import Data, Message, decode, encode

MAX_MESSAGE = 64 * 2**20
"""Maximum size of a message, bytes."""
BUFFER_BYTES = 4 * 2**20
"""Requested size of the kernel's socket buffers, bytes."""
DISCARD_BYTES = 2**20
"""Size of the buffer into which discarded bytes are received, bytes."""


class Connection:
    """Sends and receives messages. Methods raise ``ConnectionError`` if the connection is lost or the peer sends an
    invalid message.

    Args:
        connected: connected socket. This object takes ownership of it.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._length = memoryview(bytearray(4))

    async def send(self, message: Message, data: memoryview | None = None) -> None:
        """Send a message, followed by the bytes of a piece after ``Data``. Await each call before the next one."""
        encoded = encode(message)
        await self._loop.sock_sendall(self._socket, len(encoded).to_bytes(4, "little") + encoded)
        if data is not None:
            await self._loop.sock_sendall(self._socket, data)

    async def receive(self) -> Message:
        """Receive the next message. After ``Data``, call ``receive_into`` or ``discard``."""
        await self.receive_into(self._length)
        size = int.from_bytes(self._length, "little")
        if size > MAX_MESSAGE:
            raise ConnectionError(f"it sent a message of {size} bytes, more than the limit of {MAX_MESSAGE} bytes")
        data = memoryview(bytearray(size))
        await self.receive_into(data)
        try:
            return decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConnectionError(f"it sent a message that cannot be decoded: {error}") from error

    async def receive_into(self, data: memoryview, checksum: xxh3_64 | None = None) -> None:
        """Fill ``data`` with the next bytes, and update ``checksum`` with them."""
        while data:
            count = await self._loop.sock_recv_into(self._socket, data)
            if not count:
                raise ConnectionError("it was closed")
            if checksum:
                checksum.update(data[:count])
            data = data[count:]

    async def discard(self, data: Data) -> None:
        """Receive and drop the bytes of the piece that follow ``data``."""
        left, scratch = data.size, memoryview(bytearray(min(data.size, DISCARD_BYTES)))
        while left:
            part = scratch[: min(left, len(scratch))]
            await self.receive_into(part)
            left -= len(part)

    def close(self) -> None:
        self._socket.close()
