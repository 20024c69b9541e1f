"""Messages over a TCP connection to a rank on another host."""

from __future__ import annotations

import socket

HEADER = 8
"""Size in bytes of a message's header: the length of the message, little-endian."""


class SocketLink:
    """A ``Sender`` and ``Receiver`` of hidden states. It waits without a timeout, because the executor terminates ranks
    whose step takes too long.

    Args:
        descriptor: file descriptor of a connected socket. This object becomes its owner.
        peer: name of the rank at the other end, for error messages.

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
            raise self._lost(error.strerror or error) from error

    def receive(self) -> bytes:
        return bytes(self._read(int.from_bytes(self._read(HEADER), "little")))

    def _read(self, size: int) -> bytearray:
        result = bytearray(size)
        left = memoryview(result)
        while left:
            try:
                count = self._socket.recv_into(left)
            except OSError as error:
                raise self._lost(error.strerror or error) from error
            if not count:
                raise self._lost("the other end closed it")
            left = left[count:]
        return result

    def _lost(self, reason: object) -> ConnectionError:
        return ConnectionError(f"the link to {self._peer} is lost: {reason}")
