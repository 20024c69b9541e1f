"""Files of packed weights: a header with a checksum of each tensor, and data that is memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from math import prod
from typing import IO

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from penstock.core.quantization import Format
from penstock.ops import pages

MAGIC = b"PENSTK02"
"""First bytes of a file. Then follow the length of the header and its checksum (8 bytes each, little-endian), and the
header as JSON. The data starts at the next multiple of ``pages.HUGE``."""
PREFIX = len(MAGIC) + 16
ALIGNMENT = 64
"""Alignment in bytes of tensors smaller than a huge page. Larger tensors are aligned to huge pages."""
MAX_VERIFIERS = 8
"""Maximum number of threads that compute checksums. This number saturates the memory bandwidth."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32)
}
Matrices = Mapping[str, Mapping[str, Tensor]]
"""Matrix name → tensor name → tensor."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of the file."""

    offset: int
    """Bytes from the start of the data."""
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    """64-bit XXH3 of the tensor's bytes."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    state: str
    """Hash of everything that the file depends on."""
    size: int
    """Size of the data in bytes."""
    entries: dict[str, dict[str, Entry]]
    """Matrix name → tensor name → entry."""
    formats: dict[str, Format] = {}
    """Matrix name → format in the checkpoint, for quantized matrices in engine folders."""


class PackedFile:
    """A file of packed weights. If its state is ``state``, the file is mapped, and ``threads`` verify its tensors.

    If the file is truncated while it is mapped, the process is terminated by SIGBUS, as with any mapped file.

    Raises ``OSError`` or ``ValueError`` if the file is incomplete or inconsistent.
    """

    def __init__(self, file: IO[bytes], threads: Executor, state: str) -> None:
        self.header, start = read_header(file)
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """Read-only ``Matrices``."""
        self._damaged: dict[str, Future[list[str]]] = {}
        if self.header.state != state or not self.header.entries:
            return
        memory = pages.mapped(file)  # duplicates the descriptor: the file's lock is held as long as the tensors exist
        for name, entries in self.header.entries.items():
            tensors = {}
            for key, entry in entries.items():
                dtype = DTYPES[entry.dtype]
                tensor_bytes = memory[start + entry.offset :][: prod(entry.shape) * dtype.itemsize]
                tensors[key] = tensor_bytes.view(dtype).view(entry.shape)
            self.tensors[name] = tensors
            self._damaged[name] = threads.submit(_damaged, tensors, entries)

    def damaged(self, name: str) -> list[str]:
        """Names of a matrix's tensors with a wrong checksum. Waits until the matrix is verified."""
        return self._damaged[name].result()


def verifiers() -> ThreadPoolExecutor:
    """Threads for ``PackedFile``. The caller shuts the pool down without waiting after it has opened all files."""
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_VERIFIERS), "verify-weights")


class PackedLayout:
    """Layout of a new file. The same tensors give the same bytes.

    Args:
        state, formats: fields of the ``Header``.
    """

    def __init__(self, matrices: Matrices, state: str, formats: Mapping[str, Format] | None = None) -> None:
        self._tensors = {(name, key): tensor for name, matrix in matrices.items() for key, tensor in matrix.items()}
        self._entries: dict[str, dict[str, Entry]] = {name: {} for name in matrices}
        at = 0
        for (name, key), tensor in sorted(self._tensors.items(), key=lambda item: -item[1].nbytes):
            at = _up(at, pages.HUGE if tensor.nbytes >= pages.HUGE else ALIGNMENT)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._entries[name][key] = Entry(at, dtype, tuple(tensor.shape), _checksum(tensor))
            at += tensor.nbytes
        self._header = msgspec.json.encode(Header(state, at, self._entries, dict(formats or {})))
        self._start = _up(PREFIX + len(self._header), pages.HUGE)
        self.size = self._start + at
        """Size of the file in bytes."""

    def write(self, file: IO[bytes]) -> None:
        """Write the header and all tensors to a file that has ``size`` bytes."""
        numbers = (len(self._header), xxh3_64_intdigest(self._header))
        file.write(MAGIC + b"".join(number.to_bytes(8, "little") for number in numbers) + self._header)
        for (name, key), tensor in self._tensors.items():
            file.seek(self._start + self._entries[name][key].offset)
            file.write(_bytes(tensor))


def read_header(file: IO[bytes]) -> tuple[Header, int]:
    """The header of a file, and the byte offset of its data. Raises ``ValueError`` if the file is incomplete, or its
    header is inconsistent."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(PREFIX)
    if not prefix.startswith(MAGIC):
        raise ValueError(f"it does not begin with {MAGIC!r}: no packed weights of this version")
    length, checksum = (int.from_bytes(prefix[at : at + 8], "little") for at in (len(MAGIC), len(MAGIC) + 8))
    data = file.read(min(length, size))
    if len(data) != length or xxh3_64_intdigest(data) != checksum:
        raise ValueError("its header is damaged")
    try:
        header = msgspec.json.decode(data, type=Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    start = _up(PREFIX + length, pages.HUGE)
    if size != start + header.size:
        raise ValueError(f"it has {size} bytes instead of {start + header.size}")
    end = 0
    entries = [entry for matrix in header.entries.values() for entry in matrix.values()]
    for entry in sorted(entries, key=lambda entry: entry.offset):
        broken = entry.dtype not in DTYPES or min(entry.shape, default=0) < 0 or entry.offset % ALIGNMENT
        if broken or entry.offset < end:
            raise ValueError("its header is inconsistent")
        end = entry.offset + prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if end > header.size:
        raise ValueError("its header is inconsistent")
    return header, start


def _damaged(tensors: dict[str, Tensor], entries: dict[str, Entry]) -> list[str]:
    return [key for key, tensor in tensors.items() if _checksum(tensor) != entries[key].checksum]


def _checksum(tensor: Tensor) -> int:
    return xxh3_64_intdigest(_bytes(tensor))  # 20 GB/s per core; it releases the GIL


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
