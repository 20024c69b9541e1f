"""Child processes for untrusted input. A process handles one request at a time, received over a socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import weakref
from typing import Any

CHUNK = 2**18
"""Maximum number of bytes per receive call."""


class IsolatedProcess:
    """A process that answers requests: ``python -m MODULE DESCRIPTOR``. The process ends when the socket is closed.

    A message on the socket is its length (8 bytes, little-endian) followed by its bytes.
    """

    def __init__(self, module: str) -> None:
        self._socket, child_socket = socket.socketpair()
        quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with child_socket:
            number = child_socket.fileno()
            command = [sys.executable, "-P", "-m", module, str(number)]
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            self._process = subprocess.Popen(  # a separate session: Ctrl-C in a terminal must not end a request
                command, pass_fds=(number,), env=environment, start_new_session=True, **quiet
            )
        self.close = weakref.finalize(self, _end, self._socket, self._process)
        """Kill the process; also called when the object is garbage-collected."""

    @property
    def running(self) -> bool:
        return self.close.alive and self._process.poll() is None

    def request(self, message: bytes, timeout: float) -> bytes:
        """Send a message and return the reply. Raises ``OSError`` after ``timeout`` seconds, or if the process has
        ended."""
        self._socket.settimeout(timeout)
        send(self._socket, message)
        return receive(self._socket)

    async def request_async(self, message: bytes, timeout: float) -> bytes:
        """Same as ``request``, without blocking the event loop."""
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            await loop.sock_sendall(self._socket, len(message).to_bytes(8, "little") + message)
            received = bytearray()
            while len(received) < 8 or len(received) < 8 + int.from_bytes(received[:8], "little"):
                if not (chunk := await loop.sock_recv(self._socket, CHUNK)):
                    raise ConnectionResetError("the other end is closed")
                received += chunk
        return bytes(memoryview(received)[8:])


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(8, "little") + message)


def receive(connection: socket.socket) -> bytes:
    """Receive a message. Raises ``OSError`` if the other end is closed."""
    return bytes(_receive_exactly(connection, int.from_bytes(_receive_exactly(connection, 8), "little")))


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    result = bytearray(size)
    view = memoryview(result)
    while view:
        if not (count := connection.recv_into(view)):
            raise ConnectionResetError("the other end is closed")
        view = view[count:]
    return result
