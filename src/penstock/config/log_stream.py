"""Standard error for the log, written without ever waiting for who reads it."""

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

MAX_WAITING = 2**20
"""Bytes that wait for a reader; further lines are dropped, and counted."""
LAST_WAIT = 1.0
"""Seconds that an ending process waits for its last lines to be read."""


class LogHandler(logging.Handler):
    """Writes lines to standard error. A reader that stalls, as a log collector may, does not hold up the process: lines
    wait in memory, up to ``MAX_WAITING``, and how many were dropped is the first line after them."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._socket = _without_waiting(descriptor)
        self._waiting = bytearray()
        self._dropped = 0
        self._came = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the lock held."""
        try:
            if self._dropped and len(self._waiting) < MAX_WAITING // 2:
                words = "%d lines of the log were dropped, as standard error was not read"
                self._write(self.format(logging.makeLogRecord(_warning(words, self._dropped))))
                self._dropped = 0
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for what is written to be read, for at most ``LAST_WAIT``."""
        deadline = time.monotonic() + LAST_WAIT
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        if self._waiting and len(self._waiting) + len(data) > MAX_WAITING:
            self._dropped += 1
            return
        if not self._waiting:
            data = data[self._send(data) :]
        if data:
            self._waiting += data
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._send_waiting, name="log", daemon=True)
                self._thread.start()
            self._came.notify()

    def _send_waiting(self) -> None:
        """Thread: write what waits whenever the reader takes more."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while True:
            with self._came:
                while not self._waiting:
                    self._came.wait()
            poll.poll()
            with self._came:
                del self._waiting[: self._send(bytes(self._waiting[: select.PIPE_BUF]))]

    def _send(self, data: bytes) -> int:
        """How many of the bytes could be written at once; all of them where nobody will ever read them."""
        try:
            if self._socket:
                return self._socket.send(data, socket.MSG_DONTWAIT)
            return os.write(self._descriptor, data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)


def handler(stream: TextIO) -> logging.Handler:
    """The handler for ``sys.stderr``, or for what stands in its place."""
    try:
        return LogHandler(stream.fileno()) if stream is sys.stderr else logging.StreamHandler(stream)
    except (OSError, ValueError):  # no file of the system
        return logging.StreamHandler(stream)


def _without_waiting(descriptor: int) -> tuple[int, socket.socket | None]:
    """A descriptor for the same file whose writes do not wait, and a socket where it is one. Others who have it open
    keep their own mode: a pipe is opened anew, and a socket is asked each time."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        duplicate = socket.socket(fileno=os.dup(descriptor))
        return duplicate.fileno(), duplicate
    if stat.S_ISREG(mode):
        return os.dup(descriptor), None
    return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), None


def _warning(words: str, *arguments: object) -> dict[str, object]:
    return {"name": "penstock", "levelno": logging.WARNING, "levelname": "WARNING", "msg": words, "args": arguments}
