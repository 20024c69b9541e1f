"""Metrics files of API processes, with disk space allocated in advance.

prometheus-client maps sparse files: on a full disk, the first write to an unallocated page would kill the process with
SIGBUS.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from penstock.config.temporary_folder import TemporaryFolder
from penstock.core import Code, PenstockError

logger = logging.getLogger(__name__)

INITIAL_SIZE = 2**18
"""Initial size of each file in bytes; a full file is doubled."""


class AllocatedDict(MmapedDict):  # type: ignore[misc]
    """A metrics file with disk space allocated in advance. Values without space are counted only in this process."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._unshared: dict[str, tuple[float, float]] = {}
        if not read_mode:
            with open(filename, "ab") as file:
                os.posix_fallocate(file.fileno(), 0, INITIAL_SIZE)
        super().__init__(filename, read_mode)

    def read_value(self, key: str) -> tuple[float, float]:
        if key not in self._unshared and not self._has_room(key):
            self._unshared[key] = (0.0, 0.0)
        if key in self._unshared:
            return self._unshared[key]
        result: tuple[float, float] = super().read_value(key)
        return result

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if key in self._unshared:
            self._unshared[key] = (value, timestamp)
        else:
            super().write_value(key, value, timestamp)

    def _has_room(self, key: str) -> bool:
        """Allocate space for a value if needed. Returns False if the disk is full."""
        needed, capacity = self._used + len(key.encode()) + 64, self._capacity
        if key in self._positions or needed <= capacity:
            return True
        while capacity < needed:
            capacity *= 2
        try:
            os.posix_fallocate(self._f.fileno(), 0, capacity)
        except OSError as error:
            if not self._unshared:
                logger.warning("no disk space for further metrics, which are counted only in this process: %s", error)
            return False
        return True


def allocate(number: int) -> None:
    """Use ``AllocatedDict`` for all metrics created from now on.

    Args:
        number: index of the API process, used in the file names: a restarted process continues the counts.
    """
    values.MmapedDict = AllocatedDict
    values.ValueClass = values.MultiProcessValue(lambda: number)


def not_writable(error: OSError) -> PenstockError:
    """The error for metrics files that cannot be created."""
    message = f"the temporary folder cannot be written ({error.strerror}): free disk space, or set TMPDIR"
    return PenstockError(Code.INVALID, message)


@contextlib.contextmanager
def metrics_folder() -> Iterator[None]:
    """Create the folder of the metrics files, and set ``PROMETHEUS_MULTIPROC_DIR``.

    Raises ``PenstockError`` if the folder cannot be created.
    """
    try:
        folder = TemporaryFolder("metrics-")
    except OSError as error:
        raise not_writable(error) from error
    with folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder.path)
        yield
