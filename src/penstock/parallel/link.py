"""Messages over a TCP connection to a rank of another host."""

from __future__ import annotations

import socket

HEADER = 8
"""Bytes of a message's length, which precedes it, little-endian."""


class SocketLink:
    """A ``Sender`` and ``Receiver`` of hidden states. It waits as long as the connection is there: the executor ends
    ranks whose step takes too long.

    Args:
        descriptor: of a connected socket, which is this object's from now on.
        peer: whom it leads to, for errors.

    Both methods raise ``ConnectionError`` if the connection is lost.
    """

    def __init__(self, descriptor: int, peer: str) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._peer = peer

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(len(message).to_bytes(HEADER, "little"))
            self._socket.sendall(message)
        except OSError as error:
            raise ConnectionError(f"the link to {self._peer} is lost: {error.strerror or error}") from error

    def receive(self) -> bytes:
        return bytes(self._read(int.from_bytes(self._read(HEADER), "little")))

    def _read(self, size: int) -> bytearray:
        result = bytearray(size)
        left = memoryview(result)
        while left:
            try:
                count = self._socket.recv_into(left)
            except OSError as error:
                raise ConnectionError(f"the link to {self._peer} is lost: {error.strerror or error}") from error
            if not count:
                raise ConnectionError(f"the link to {self._peer} is lost: it was closed")
            left = left[count:]
        return result
