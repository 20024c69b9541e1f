"""Requests of the steps in flight, in memory mapped by the engine, its launcher and its clients.

The engine writes them before it submits a step. If it dies, the memory still has the requests of the fatal step: only
these can have caused the death.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterable

MAX_REQUESTS = 4092
"""Maximum number of requests in the record; it omits further ones."""
HEADER = 3
"""Number of integers before the requests: process id, number of requests, 1 if engines died with one of them before."""


class StepRecord:
    """The record of the engine at an address. It holds 64-bit integers: ``HEADER``, then ``EngineRequest.uid`` of each
    request.

    Args:
        address: address of the engine, ``ipc://…``.
    """

    def __init__(self, address: str) -> None:
        size = 8 * (HEADER + MAX_REQUESTS)
        file = os.open(address.removeprefix("ipc://") + ".step", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # not sparse: writing to a page without disk space would kill the process
            self._memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._values = memoryview(self._memory).cast("Q")
        self._pid = os.getpid()

    def write(self, requests: Iterable[tuple[int, int]]) -> None:
        """Record the steps in flight of this process.

        Args:
            requests: ``uid`` and ``deaths`` of each request, possibly repeated; empty if no step is in flight.
        """
        known = dict(requests)
        uids = array("Q", list(known)[:MAX_REQUESTS])
        self._values[:HEADER] = array("Q", (self._pid, len(uids), any(known.values())))
        self._values[HEADER : HEADER + len(uids)] = uids

    def read(self, pid: int) -> frozenset[int]:
        """Requests of the last steps of process ``pid``; empty if another process has written since."""
        if self._values[0] != pid:
            return frozenset()
        return frozenset(self._values[HEADER : HEADER + self._values[1]])

    def has_repeated(self, pid: int) -> bool:
        """True if an engine had already died with one of the requests in the last steps of process ``pid``."""
        return self._values[0] == pid and bool(self._values[2])

    def close(self) -> None:
        self._values.release()
        self._memory.close()
