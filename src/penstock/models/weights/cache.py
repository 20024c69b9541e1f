"""Cache of packed weights on disk, which the next start maps instead of quantizing and packing again."""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
from pathlib import Path

from torch import Tensor

from penstock.config.cache_folder import SUFFIX, limit_bytes, new_file, open_cached
from penstock.version import __version__

from .packed_file import PackedFile, PackedLayout, verifiers

logger = logging.getLogger(__name__)

EXIT_TIMEOUT = 8.0
"""Seconds that an exiting process waits for the thread that writes the file. After that, the file stays incomplete."""
LOGGED_NAMES = 3
"""Maximum number of damaged tensors named in a log line."""


class WeightCache:
    """``layers.PackedWeights``: the packed matrices of a checkpoint for one packing and rank, in one file.

    The file is mapped, so engines on a machine share its pages, and nothing is copied. Threads verify each tensor's
    checksum before it is used. Tensors are packed again from the checkpoint, and ``save`` replaces the file, if they
    are damaged, belong to another state of the checkpoint or another version of Penstock, or may have been written by
    another user.

    If a file is truncated while an engine maps it, SIGBUS terminates the engine; the next start detects the damage.

    Args:
        folder: folder of the cache.
        checkpoint: folder of the checkpoint.
        packing: everything except the weights that packed matrices depend on: layout, dtype, formats, rank, ranks.
        state: state of the checkpoint's files. A cache file for another state is replaced.
        limit: maximum size of the folder in GiB; 0: a share of the disk (``cache_folder``).
    """

    def __init__(self, folder: Path, checkpoint: Path, packing: str, state: str, limit: float = 0.0) -> None:
        name = hashlib.sha256(f"{checkpoint.resolve()} {packing}".encode()).hexdigest()[:32]
        self._path = folder / f"{name}{SUFFIX}"
        self._limit = limit
        self._state = hashlib.sha256(f"{__version__} {state}".encode()).hexdigest()
        self._tensors: dict[str, dict[str, Tensor]] = {}
        """All matrices of the model, in build order."""
        self._changed = False
        """True if the file lacks a matrix of ``_tensors``."""
        self._file: PackedFile | None = None
        """File of an earlier start; None if it is missing or belongs to another state of the checkpoint."""
        self._damaged: list[str] = []
        """Names of the damaged tensors found so far, for the log."""
        self.mapped_bytes = 0
        """Number of mapped bytes."""
        try:
            self._map()
        except FileNotFoundError:
            pass
        except Exception as error:  # a broken cache must not prevent the start
            logger.warning("%s cannot be used (%s); packing the weights again", self._path, error)

    def find(self, name: str) -> dict[str, Tensor] | None:
        """Read-only tensors of a matrix; None if the file lacks the matrix, or a tensor is damaged."""
        if self._file is None or (tensors := self._file.tensors.get(name)) is None:
            return None
        if damaged := self._file.damaged(name):
            self._damaged += [f"{name} ({key})" for key in damaged]
            return None
        self._tensors[name] = tensors
        return tensors

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Add a matrix for ``save`` to write. A matrix without tensors needs no packing and is not stored."""
        if tensors:
            self._tensors[name] = tensors
            self._changed = True

    def save(self) -> None:
        """Write the file in a thread if it lacks a matrix; the start continues meanwhile. Failures are logged."""
        if self._damaged:
            count = f"{len(self._damaged)} tensors are" if len(self._damaged) > 1 else "a tensor is"
            names = ", ".join(self._damaged[:LOGGED_NAMES]) + ", …" * (len(self._damaged) > LOGGED_NAMES)
            logger.warning("%s: %s damaged and packed again: %s", self._path, count, names)
        if self._changed:
            thread = threading.Thread(target=self._save, name="keep-weights", daemon=True)
            thread.start()
            atexit.register(thread.join, EXIT_TIMEOUT)

    def _map(self) -> None:
        """Map the file if its state is ``_state``. A missing or damaged file raises ``OSError`` or ``ValueError``."""
        threads = verifiers()
        with open_cached(self._path) as file:
            found = PackedFile(file, threads, self._state)
        threads.shutdown(wait=False)
        if found.header.state != self._state:
            message = "%s belongs to another state of the checkpoint or another version: packing the weights again"
            logger.info(message, self._path)
            return
        self._file, self.mapped_bytes = found, found.header.size

    def _save(self) -> None:
        try:
            self._write()
            logger.debug("packed weights are stored for the next start in %s", self._path)
        except Exception as error:
            logger.info("packed weights are not stored for the next start: %s", error)
        self._tensors = {}

    def _write(self) -> None:
        layout = PackedLayout(self._tensors, self._state)
        with new_file(self._path, layout.size, limit_bytes(self._path.parent, self._limit)) as file:
            layout.write(file)
