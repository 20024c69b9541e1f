"""A cache of packed weights on disk: the next start maps them in place of quantizing and packing again."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from penstock.ops import pages
from penstock.version import __version__

from .cache_folder import SUFFIX, limit_bytes, new_file, open_cached

logger = logging.getLogger(__name__)

MAGIC = b"PENSTK02"
"""A file begins with this, the length of its header and the header's checksum (8 bytes each, little-endian), and the
header as JSON. The data begin at the next multiple of ``pages.HUGE``."""
PREFIX = len(MAGIC) + 16
ALIGNMENT = 64
"""Alignment in bytes of tensors smaller than a huge page; larger ones are aligned to huge pages."""
EXIT_TIMEOUT = 8.0
"""Seconds that an ending process waits for its writing thread; then the file stays unfinished."""
MAX_VERIFIERS = 8
"""Threads that compute checksums: a few are as fast as memory."""
LOGGED_NAMES = 3
"""Names of damaged tensors in a log line."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.bfloat16, torch.float16, torch.float32)
}


class Entry(msgspec.Struct, frozen=True):
    """One tensor of the file."""

    offset: int
    """Bytes from the begin of the data."""
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    """XXH3, 64 bits, of its bytes."""


class Header(msgspec.Struct, frozen=True):
    state: str
    """Hash of the checkpoint's state and of Penstock's version."""
    size: int
    """Bytes of the data."""
    entries: dict[str, dict[str, Entry]]
    """Matrix name → tensor name → tensor."""


class WeightCache:
    """The packed matrices of one checkpoint, in one format, of one rank: one file of the cache folder.

    The file is mapped: engines on one machine share its pages, and nothing is copied. Threads verify each tensor's
    checksum before it is handed out. Tensors are packed again from the checkpoint, and ``save`` replaces the file,
    where they are damaged, were made from another state of the checkpoint or by another version of Penstock, or
    may have been written by another user.

    A file that is truncated while an engine has it mapped ends that engine with SIGBUS, as any mapped file does; the
    next start finds it damaged.

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
        self._mapped: dict[str, dict[str, Tensor]] = {}
        self._verified: dict[str, Future[list[str]]] = {}
        """Names of each matrix's damaged tensors, once they are verified."""
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
        """The tensors of a matrix, read-only; None where the file has none, or one of them is damaged."""
        if (tensors := self._mapped.get(name)) is None:
            return None
        if damaged := self._verified.pop(name).result():
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

        Raises ``OSError`` or ``ValueError`` where it cannot be used.
        """
        with open_cached(self._path) as file:
            header, start = _read_header(file)
            if header.state != self._state:
                logger.info("%s is of another state of the checkpoint or another version: made again", self._path)
                return
            memory = pages.mapped(file)  # which holds the file's lock, too
        self.mapped_bytes = header.size
        threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_VERIFIERS), "verify-weights")
        for name, entries in header.entries.items():
            tensors = {}
            for key, entry in entries.items():
                dtype = DTYPES[entry.dtype]
                tensor_bytes = memory[start + entry.offset :][: prod(entry.shape) * dtype.itemsize]
                tensors[key] = tensor_bytes.view(dtype).view(entry.shape)
            self._mapped[name] = tensors
            self._verified[name] = threads.submit(_damaged, tensors, entries)
        threads.shutdown(wait=False)

    def _save(self) -> None:
        try:
            self._write()
            logger.debug("packed weights are kept for the next start in %s", self._path)
        except Exception as error:
            logger.info("packed weights are not kept for the next start: %s", error)
        self._tensors = {}

    def _write(self) -> None:
        tensors = {(name, key): tensor for name, matrix in self._tensors.items() for key, tensor in matrix.items()}
        at = 0
        entries: dict[str, dict[str, Entry]] = {name: {} for name in self._tensors}
        for (name, key), tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
            at = _up(at, pages.HUGE if tensor.nbytes >= pages.HUGE else ALIGNMENT)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name][key] = Entry(at, dtype, tuple(tensor.shape), _checksum(tensor))
            at += tensor.nbytes
        header = msgspec.json.encode(Header(self._state, at, entries))
        start = _up(PREFIX + len(header), pages.HUGE)
        numbers = b"".join(number.to_bytes(8, "little") for number in (len(header), xxh3_64_intdigest(header)))
        with new_file(self._path, start + at, limit_bytes(self._path.parent, self._limit)) as file:
            file.write(MAGIC + numbers + header)
            for (name, key), tensor in tensors.items():
                file.seek(start + entries[name][key].offset)
                file.write(_bytes(tensor))


def _read_header(file: IO[bytes]) -> tuple[Header, int]:
    """The header of a file, and the offset of its data. Raises ``ValueError`` where the file is not whole, or its
    header is not consistent."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(PREFIX)
    if not prefix.startswith(MAGIC):
        raise ValueError("it is no weight cache of this version")
    length, checksum = (int.from_bytes(prefix[at : at + 8], "little") for at in (len(MAGIC), len(MAGIC) + 8))
    data = file.read(min(length, size))
    if len(data) != length or xxh3_64_intdigest(data) != checksum:
        raise ValueError("its header is damaged")
    header = msgspec.json.decode(data, type=Header)
    start = _up(PREFIX + length, pages.HUGE)
    if size != start + header.size:
        raise ValueError("it is not of its full length")
    end = 0
    entries = [entry for matrix in header.entries.values() for entry in matrix.values()]
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0 or entry.offset < end:
            raise ValueError("its header says what cannot be")
        end = entry.offset + prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if end > header.size:
        raise ValueError("its header says what cannot be")
    return header, start


def _damaged(tensors: dict[str, Tensor], entries: dict[str, Entry]) -> list[str]:
    """Names of the tensors whose checksum differs."""
    return [key for key, tensor in tensors.items() if _checksum(tensor) != entries[key].checksum]


def _checksum(tensor: Tensor) -> int:
    return xxh3_64_intdigest(_bytes(tensor))  # at 20 GB/s a core, and without Python's lock


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
