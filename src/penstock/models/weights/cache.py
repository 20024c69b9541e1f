"""A cache of packed weights on disk: the next start maps them in place of quantizing and packing again."""

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
"""Seconds that an ending process waits for its writing thread; then the file stays unfinished."""
LOGGED_NAMES = 3
"""Names of damaged tensors in a log line."""


class WeightCache:
    """The packed matrices of one checkpoint, in one format, of one rank: one file of the cache folder.

    The file is mapped: engines on one machine share its pages, and nothing is copied. Threads verify each tensor's
    checksum before it is handed out. Tensors are packed again from the checkpoint, and ``save`` replaces the file,
    where they are damaged, were made from another state of the checkpoint or by another version of Penstock, or
    may have been written by another user.

    A file that is truncated while an engine has it mapped ends that engine with SIGBUS; the next start finds it so.

    Args:
        folder: of the cache.
        checkpoint: folder of the checkpoint.
        packing: all that decides a packed matrix besides the weights: layout, dtype, formats, rank and ranks.
        state: of the checkpoint's files. What was made from another state is replaced.
        limit: GiB that the folder may hold; 0 is the default, see ``cache_folder``.
    """

    def __init__(self, folder: Path, checkpoint: Path, packing: str, state: str, limit: float = 0.0) -> None:
        name = hashlib.sha256(f"{checkpoint.resolve()} {packing}".encode()).hexdigest()[:32]
        self._path = folder / f"{name}{SUFFIX}"
        self._limit = limit
        self._state = hashlib.sha256(f"{__version__} {state}".encode()).hexdigest()
        self._tensors: dict[str, dict[str, Tensor]] = {}
        """All matrices of the model, in the order in which it is built."""
        self._changed = False
        """Whether the file lacks any of ``_tensors``."""
        self._file: PackedFile | None = None
        """That of the last start, while it is of this state of the checkpoint."""
        self._damaged: list[str] = []
        """Damaged tensors found so far, for the log."""
        self.mapped_bytes = 0
        """Size of the mapped data."""
        try:
            self._map()
        except FileNotFoundError:
            pass
        except Exception as error:  # a cache keeps no engine from starting
            logger.warning("%s cannot be used (%s) and is made again", self._path, error)

    def find(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a matrix, read-only; None if the file has none, or one of them is damaged."""
        if self._file is None or (tensors := self._file.tensors.get(name)) is None:
            return None
        if damaged := self._file.damaged(name):
            self._damaged += [f"{name} ({key})" for key in damaged]
            return None
        self._tensors[name] = tensors
        return tensors

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Add a matrix for ``save`` to write. A matrix without tensors needs no packing and is not kept."""
        if tensors:
            self._tensors[name] = tensors
            self._changed = True

    def save(self) -> None:
        """Write the file in a thread if it lacks any matrix; the start goes on meanwhile. Logs where it cannot."""
        if self._damaged:
            count = f"{len(self._damaged)} tensors are" if len(self._damaged) > 1 else "a tensor is"
            names = ", ".join(self._damaged[:LOGGED_NAMES]) + ", …" * (len(self._damaged) > LOGGED_NAMES)
            logger.warning("%s: %s damaged and made again: %s", self._path, count, names)
        if self._changed:
            thread = threading.Thread(target=self._save, name="keep-weights", daemon=True)
            thread.start()
            atexit.register(thread.join, EXIT_TIMEOUT)

    def _map(self) -> None:
        """Map the file if it is of this version, and start to verify it.

        Raises ``OSError`` or ``ValueError`` if it cannot be used.
        """
        threads = verifiers()
        with open_cached(self._path) as file:
            found = PackedFile(file, threads, self._state)
        threads.shutdown(wait=False)
        if found.header.state != self._state:
            logger.info("%s is of another state of the checkpoint or another version: made again", self._path)
            return
        self._file, self.mapped_bytes = found, found.header.size

    def _save(self) -> None:
        try:
            self._write()
            logger.debug("packed weights are kept for the next start in %s", self._path)
        except Exception as error:
            logger.info("packed weights are not kept for the next start: %s", error)
        self._tensors = {}

    def _write(self) -> None:
        layout = PackedLayout(self._tensors, self._state)
        with new_file(self._path, layout.size, limit_bytes(self._path.parent, self._limit)) as file:
            layout.write(file)
