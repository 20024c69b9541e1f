"""The transport between two engines on one host: the decode engine maps the prefill engine's transfer buffer."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import msgspec
import numpy as np
from xxhash import xxh3_64

from .buffer import HEADER_BYTES, IDENTITY_BYTES, TransferBuffer, data_offset

COPY_BYTES = 512 * 1024
"""Bytes that are copied and then checksummed at a time, so that they are still in the CPU cache."""


class BufferAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a transfer buffer for processes of the same host and user."""

    path: str
    """``/proc/PID/fd/NUMBER``."""
    identity: bytes
    """Random identity at the start of the buffer."""
    slots: int
    """Number of slots."""
    slot_bytes: int
    """Bytes per slot."""


def address_of(buffer: TransferBuffer) -> BufferAddress:
    """Address of this process's buffer."""
    return BufferAddress(buffer.path, buffer.identity, buffer.num_slots, buffer.slot_bytes)


class RemoteBuffer:
    """The transfer buffer of another process, read-only.

    Raises ``OSError`` if it cannot be opened, for example from another host or container.
    """

    def __init__(self, address: BufferAddress) -> None:
        offset = data_offset(address.slots)
        size = offset + address.slots * address.slot_bytes
        if not re.fullmatch(r"/proc/\d+/fd/\d+", address.path):
            raise OSError(f"{address.path!r} is not the path of a transfer buffer")
        descriptor = os.open(Path(address.path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if (found := os.fstat(descriptor).st_size) != size:
                raise OSError(f"{address.path} has {found} bytes, not {size}")
            self._memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        if self._memory[:IDENTITY_BYTES] != address.identity:
            raise OSError(f"{address.path} is another transfer buffer")
        self._epochs = np.frombuffer(self._memory, np.int64)[HEADER_BYTES // 8 :][: address.slots]
        self._data = np.frombuffer(self._memory, np.uint8)[offset:].reshape(address.slots, address.slot_bytes)

    def read(self, slot: int, epoch: int, first_byte: int, into: memoryview, checksum: xxh3_64) -> bool:
        """Copy bytes of a slot, and update ``checksum`` with the copy. Returns False if the slot did not have ``epoch``
        during the whole copy."""
        if not 0 <= slot < len(self._epochs) or self._epochs[slot] != epoch:
            return False
        for begin in range(0, len(into), COPY_BYTES):
            part = into[begin : begin + COPY_BYTES]
            np.frombuffer(part, np.uint8)[:] = self._data[slot, first_byte + begin :][: len(part)]
            checksum.update(part)
        return bool(self._epochs[slot] == epoch)
