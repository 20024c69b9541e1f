"""Records of running servers, by which ``penstock ps`` and ``penstock stop`` find them: a file per server."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.config.temporary_folder import PREFIX, TemporaryFolder, remove_unlocked
from penstock.core import PenstockError

KIND, FILE = "server-", "server.json"
"""Kind of the temporary folder of a record, and the file in it."""
REFRESH_INTERVAL = 3600.0
"""Minimum seconds between two refreshes of a record."""

logger = logging.getLogger(__name__)


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A running server. Fields have defaults, since another version may have written the record."""

    pid: int
    """Process id of the supervisor, or of ``penstock pd``."""
    start_time: str
    """Start time of the process (``process_start_time``), which identifies it if its id is used again."""
    state: str = "starting"
    """``starting``, ``ready``, ``sleeping`` (all its models sleep) or ``draining`` (it is stopping)."""
    models: dict[str, str] = {}
    """State of each model by name: as of a server, or ``unloaded``."""
    url: str = ""
    """URL for clients on this machine; empty before the server listens, and without HTTP."""
    grpc_address: str = ""
    """Host and port of gRPC; empty: no gRPC."""
    role: str = "mixed"
    """The option ``role``; ``pd`` for a deployment of ``penstock pd``, whose processes have separate records."""
    device: str = ""
    """The option ``device``."""
    drain_timeout: float = 0.0
    """The option ``drain_timeout`` in seconds."""


class RecordFile:
    """The record of this process's server, removed by ``close``. A record that cannot be written affects nothing else.

    Args:
        fields: fields of ``ServerRecord`` except ``pid`` and ``start_time``.
    """

    def __init__(self, **fields: Any) -> None:
        self.record = ServerRecord(pid=os.getpid(), start_time=process_start_time(os.getpid()), **fields)
        self._folder = _new_folder()
        self._refreshed = -math.inf
        self._write()

    def update(self, **changes: Any) -> None:
        """Change fields of the record. Writes the file if a value differs."""
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._write()

    def refresh(self) -> None:
        """Keep the record, unless ``REFRESH_INTERVAL`` has not passed: systemd-tmpfiles removes files in ``/tmp`` that
        were not used for ten days. Writes it again if it was removed."""
        if not self._folder or time.monotonic() - self._refreshed < REFRESH_INTERVAL:
            return
        self._refreshed = time.monotonic()
        try:
            self._folder.touch()
        except OSError:
            self._folder.close()
            self._folder = _new_folder()
        self._write()

    def close(self) -> None:
        if self._folder:
            self._folder.close()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        if not self._folder:
            return
        try:
            unfinished = self._folder.path / f"{FILE}.part"
            unfinished.write_bytes(msgspec.json.encode(self.record))
            unfinished.replace(self._folder.path / FILE)
        except OSError as error:
            logger.debug("the record for penstock ps cannot be written: %s", error)


def _new_folder() -> TemporaryFolder | None:
    """Folder for a record; None if it cannot be created."""
    try:
        return TemporaryFolder(KIND)
    except (OSError, PenstockError) as error:
        logger.debug("penstock ps will not list this server: %s", error)
        return None


def running_servers() -> list[ServerRecord]:
    """Records of the running servers of this user, oldest first. Removes those of killed servers.

    Finds servers with the same temporary folder (``TMPDIR``) as this process. A server of another PID namespace, whose
    process id means another process here, is not found.
    """
    folder = Path(tempfile.gettempdir())
    remove_unlocked(folder)
    found = [record for record in _records(folder) if process_start_time(record.pid) == record.start_time]
    return sorted(found, key=lambda record: (int(record.start_time), record.pid))


def _records(folder: Path) -> Iterator[ServerRecord]:
    for path in folder.glob(f"{PREFIX}{KIND}*/{FILE}"):
        try:
            status = path.parent.lstat()
            if status.st_uid == os.getuid() and not path.parent.is_symlink():
                yield msgspec.json.decode(path.read_bytes(), type=ServerRecord)
        except (OSError, msgspec.MsgspecError):  # the server has just ended, or runs an incompatible version
            continue


def process_start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
