"""State that clients change at run time, shared by all API processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec


class Region(msgspec.Struct, frozen=True):
    """A registered part of a POSIX shared memory object."""

    name: str
    """Name given by the client."""
    tenant: str
    """Tenant that registered the region (``RequestRecord.tenant``)."""
    key: str
    """Name of the shared memory object."""
    offset: int
    """Start of the region in the object, bytes."""
    byte_size: int


class State(msgspec.Struct):
    log: dict[str, Any] = {}
    """Log setting → value, for changed settings."""
    trace: dict[str, dict[str, Any]] = {}
    """Model name → changed trace settings; the empty name has the global settings."""
    regions: dict[str, Region] = {}
    """Tenant and name (``SharedMemory._full_name``) → region of system shared memory."""
    max_batch_size: dict[str, int] = {}
    """Model name → ``max_batch_size`` from the load request."""


class SharedState:
    """State in a file that all API processes read and write.

    Args:
        folder: folder used only by the API processes; deleted when the server stops.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "kserve.json"
        self._lock = folder / "kserve.lock"
        self._seen: tuple[int, int] | None = None
        self._state = State()

    def read(self) -> State:
        """The current state; do not modify it."""
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return self._state
        if (seen := (stat.st_ino, stat.st_mtime_ns)) != self._seen:
            self._state = msgspec.json.decode(self._path.read_bytes(), type=State)
            self._seen = seen
        return self._state

    @contextmanager
    def update(self) -> Iterator[State]:
        """Yield a copy of the state to modify, under a lock. It is written on exit, or dropped on an exception."""
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = msgspec.json.decode(msgspec.json.encode(self.read()), type=State)
            yield state
            tmp_path = self._path.with_suffix(".new")
            tmp_path.write_bytes(msgspec.json.encode(state))
            tmp_path.replace(self._path)
