"""Packed matrices of a checkpoint on disk, so that the next start need not round and pack them again."""

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

from penstock import __version__
from penstock.ops import pages

from .cache_folder import SUFFIX, limit_bytes, new_file, open_cached

logger = logging.getLogger(__name__)

MAGIC = b"PENSTK02"
"""A file begins with this, the length of its header and the header's checksum (8 bytes each, little-endian), and the
header as JSON. The data begin at the next multiple of ``pages.HUGE``."""
PREFIX = len(MAGIC) + 16
ALIGNMENT = 64
"""Bytes, of tensors smaller than a huge page; larger ones begin with one, to be mapped as such."""
EXIT_TIMEOUT = 8.0
"""Seconds that a process which ends waits for what it still writes; then it is left unfinished."""
VERIFIERS = 8
"""Most threads that compute checksums: a few are as fast as memory."""
TOLD = 3
"""Names of damaged tensors in the log."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.bfloat16, torch.float16, torch.float32)
}


class Entry(msgspec.Struct, frozen=True):
    """One tensor of the file."""

    offset: int
    """In bytes, from the begin of the data."""
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    """XXH3, 64 bits, of its bytes."""


class Header(msgspec.Struct, frozen=True):
    state: str
    """Of the checkpoint and of Penstock, see ``_state``."""
    size: int
    """Of the data, in bytes."""
    entries: dict[str, dict[str, Entry]]
    """By the matrix's name and the tensor's."""


class WeightCache:
    """The packed matrices of one checkpoint in one form: one file of a folder.

    The file is mapped, not read: engines on one machine share it, and nothing is copied. Each tensor's checksum is
    verified by threads before the tensor is handed out. What is damaged, was made from another state of the checkpoint
    (another configuration; other headers, sizes or times of its files) or by another version, or may have been written
    by another user is not used: it is packed anew from the checkpoint, and ``save`` replaces the file.

    A file that is truncated while an engine has it mapped ends that engine with SIGBUS, as any mapped file does; the
    next start finds it damaged.

    Args:
        folder: of the cache.
        form: all that decides the bytes of a packed matrix besides the checkpoint.
        limit: GiB that the folder may hold; 0 is the default, see ``cache_folder``.
    """

    def __init__(self, folder: Path, checkpoint: Path, form: str, limit: float = 0.0) -> None:
        name = hashlib.sha256(f"{checkpoint.resolve()} {form}".encode()).hexdigest()[:32]
        self._path = folder / f"{name}{SUFFIX}"
        self._limit = limit
        self._state = _state(checkpoint)
        self._kept: dict[str, dict[str, Tensor]] = {}
        """What the model consists of, in the order in which it was built."""
        self._changed = False
        """Whether the file lacks any of it."""
        self._mapped: dict[str, dict[str, Tensor]] = {}
        self._verified: dict[str, Future[list[str]]] = {}
        """Which of a matrix's tensors are damaged, once they are verified."""
        self._damaged: list[str] = []
        """Tensors that were."""
        self.mapped_bytes = 0
        """Of the file."""
        try:
            self._map()
        except FileNotFoundError:
            pass
        except Exception as error:  # a cache keeps no engine from starting
            logger.warning("%s cannot be used (%s) and is made again", self._path, error)

    def find(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a matrix, to read only; None where there are none, or one of them is damaged."""
        if (found := self._mapped.get(name)) is None:
            return None
        if damaged := self._verified.pop(name).result():
            self._damaged += [f"{name} ({key})" for key in damaged]
            return None
        self._kept[name] = found
        return found

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """The tensors of a matrix, for ``save``."""
        if tensors:
            self._kept[name] = tensors
            self._changed = True

    def save(self) -> None:
        """Write the file anew if there is anything to add to it, in a thread while the start goes on.

        Where there is no room for it, the log says so.
        """
        if self._damaged:
            count = f"{len(self._damaged)} tensors are" if len(self._damaged) > 1 else "a tensor is"
            names = ", ".join(self._damaged[:TOLD]) + ", …" * (len(self._damaged) > TOLD)
            logger.warning("%s: %s damaged and made again: %s", self._path, count, names)
        if self._changed:
            thread = threading.Thread(target=self._save, name="keep-weights", daemon=True)
            thread.start()
            atexit.register(thread.join, EXIT_TIMEOUT)

    def _map(self) -> None:
        """Map the file, if it is of this state, and begin to verify it.

        Raises ``OSError`` or ``ValueError`` where it cannot be used.
        """
        with open_cached(self._path) as file:
            header, start = _read_header(file)
            if header.state != self._state:
                logger.info("%s is of another state of the checkpoint or another version: made again", self._path)
                return
            memory = pages.mapped(file)  # which holds the file's lock, too
        self.mapped_bytes = header.size
        threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), VERIFIERS), "verify-weights")
        for name, entries in header.entries.items():
            tensors = {}
            for key, entry in entries.items():
                dtype = DTYPES[entry.dtype]
                own = memory[start + entry.offset :][: prod(entry.shape) * dtype.itemsize]
                tensors[key] = own.view(dtype).view(entry.shape)
            self._mapped[name] = tensors
            self._verified[name] = threads.submit(_damaged, tensors, entries)
        threads.shutdown(wait=False)

    def _save(self) -> None:
        try:
            self._write()
            logger.debug("packed weights are kept for the next start in %s", self._path)
        except Exception as error:
            logger.info("packed weights are not kept for the next start: %s", error)
        self._kept = {}

    def _write(self) -> None:
        tensors = {(name, key): tensor for name, own in self._kept.items() for key, tensor in own.items()}
        at = 0
        entries: dict[str, dict[str, Entry]] = {name: {} for name in self._kept}
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
    """The header of a file, and where its data begin. Raises ``ValueError`` where it is not whole, or says what cannot
    be."""
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
    entries = [entry for own in header.entries.values() for entry in own.values()]
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0 or entry.offset < end:
            raise ValueError("its header says what cannot be")
        end = entry.offset + prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if end > header.size:
        raise ValueError("its header says what cannot be")
    return header, start


def _damaged(tensors: dict[str, Tensor], entries: dict[str, Entry]) -> list[str]:
    """The names of tensors that do not have their checksum."""
    return [key for key, tensor in tensors.items() if _checksum(tensor) != entries[key].checksum]


def _checksum(tensor: Tensor) -> int:
    return xxh3_64_intdigest(_bytes(tensor))  # at 20 GB/s a core, and without Python's lock


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _state(checkpoint: Path) -> str:
    """Of what the file is made: this version, the checkpoint's configuration, its files' names, sizes, times and
    headers. The time of the last change (``ctime``) is among them: tools that copy files set the other one back."""
    digest = hashlib.sha256(__version__.encode())
    for name in ("config.json", "model.safetensors.index.json"):
        if (path := checkpoint / name).exists():
            digest.update(path.read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            digest.update(content.read(min(length, status.st_size)))
    return digest.hexdigest()
