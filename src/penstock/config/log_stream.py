"""Logging handler for standard error that never blocks on a slow reader."""

from __future__ import annotations

import atexit
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from typing import TextIO

MAX_BUFFERED = 2**20
"""Maximum bytes buffered for a slow reader; further lines are dropped and counted."""
FLUSH_TIMEOUT = 1.0
"""Maximum seconds that ``flush``, also called at exit, waits for buffered lines to be written."""


class LogHandler(logging.Handler):
    """Writes lines to standard error without blocking if its reader (a log collector) stalls.

    Up to ``MAX_BUFFERED`` bytes are buffered in memory. Further lines are dropped; a later warning has their number.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._socket = _open_nonblocking(descriptor)
        self._buffer = bytearray()
        self._dropped = 0
        self._buffered = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line or buffer it. Called with the lock held."""
        try:
            if self._dropped and len(self._buffer) < MAX_BUFFERED // 2:
                message = "%d log lines were dropped, as the reader of standard error was too slow"
                arguments = (message, (self._dropped,), None)
                self._write(self.format(logging.LogRecord("penstock", logging.WARNING, __file__, 0, *arguments)))
                self._dropped = 0
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until the buffer is written, for at most ``FLUSH_TIMEOUT``."""
        deadline = time.monotonic() + FLUSH_TIMEOUT
        while self._buffer and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        if self._buffer and len(self._buffer) + len(data) > MAX_BUFFERED:
            self._dropped += 1
            return
        if not self._buffer:
            data = data[self._send(data) :]
        if data:
            self._buffer += data
            if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
                self._thread = threading.Thread(target=self._send_buffer, name="log", daemon=True)
                self._thread.start()
            self._buffered.notify()

    def _send_buffer(self) -> None:
        """Thread: write buffered data whenever the reader accepts more."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while True:
            with self._buffered:
                while not self._buffer:
                    self._buffered.wait()
            poll.poll()
            with self._buffered:
                del self._buffer[: self._send(bytes(self._buffer[: select.PIPE_BUF]))]

    def _send(self, data: bytes) -> int:
        """Write without blocking; returns the number of bytes written, or ``len(data)`` if the reader has exited."""
        try:
            if self._socket:
                return self._socket.send(data, socket.MSG_DONTWAIT)
            return os.write(self._descriptor, data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)


def handler(stream: TextIO) -> logging.Handler:
    """Create the handler for ``sys.stderr``, or for a stream that replaces it."""
    try:
        return LogHandler(stream.fileno()) if stream is sys.stderr else logging.StreamHandler(stream)
    except (OSError, ValueError):  # the stream has no file descriptor
        return logging.StreamHandler(stream)


def _open_nonblocking(descriptor: int) -> tuple[int, socket.socket | None]:
    """Open a descriptor of the same file for non-blocking writes; also returns the socket if the file is one.

    The mode of the given descriptor, which other processes may share, is unchanged: a pipe is reopened, and a socket
    uses ``MSG_DONTWAIT``.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        duplicate = socket.socket(fileno=os.dup(descriptor))
        return duplicate.fileno(), duplicate
    if stat.S_ISREG(mode):
        return os.dup(descriptor), None
    return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), None
