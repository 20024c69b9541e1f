"""TCP proxy that resets its connections on demand."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

RESET = struct.pack("ii", 1, 0)
"""Value of ``SO_LINGER`` with which ``close`` resets a connection."""


class TcpProxy:
    """Forwards connections to a port of this host. Use it as a context manager."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def reset(self) -> int:
        """Reset all connections, and return their number. New connections are accepted."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with suppress(OSError):
                one.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            one.close()
        return len(sockets) // 2

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
