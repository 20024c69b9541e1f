"""The files in which API processes count, with room on the disk from the start.

prometheus-client maps sparse files: the first write to a page for which a full disk has no room would end the process
with SIGBUS.
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
"""Bytes of each file; a larger one is doubled when it is full."""


class AllocatedDict(MmapedDict):  # type: ignore[misc]
    """A file of values whose pages the disk has; values for which it has none are counted in this process alone."""

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
        """Whether the file has, or has been given, room for a value."""
        needed, capacity = self._used + len(key.encode()) + 64, self._capacity
        if key in self._positions or needed <= capacity:
            return True
        while capacity < needed:
            capacity *= 2
        try:
            os.posix_fallocate(self._f.fileno(), 0, capacity)
        except OSError as error:
            if not self._unshared:
                logger.warning("there is no room for further metrics, which count in this process alone: %s", error)
            return False
        return True


def allocate(number: int) -> None:
    """Have all metrics that are made from now on counted in such files.

    Args:
        number: index of the API process, which names its files: a process that is restarted goes on counting in those
            of the one before.
    """
    values.MmapedDict = AllocatedDict
    values.ValueClass = values.MultiProcessValue(lambda: number)


def no_room(error: OSError) -> PenstockError:
    """The error for files that cannot be made."""
    message = f"the temporary folder cannot be written ({error.strerror}): free some of it, or set TMPDIR"
    return PenstockError(Code.INVALID, message)


@contextlib.contextmanager
def metrics_folder() -> Iterator[None]:
    """The folder of the metrics that API processes share, named by ``PROMETHEUS_MULTIPROC_DIR``.

    Raises ``PenstockError`` where none can be made.
    """
    try:
        folder = TemporaryFolder("metrics-")
    except OSError as error:
        raise no_room(error) from error
    with folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder.path)
        yield
