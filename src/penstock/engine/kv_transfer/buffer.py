"""The transfer buffer: keys and values in the canonical layout, in memory that an engine and its workers share."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from ..step import TransferMemory

HEADER_BYTES = 16384
"""Bytes before the epochs: the identity, ``IDENTITY_BYTES`` long, and from ``PROGRESS`` on the ranks' progress."""
IDENTITY_BYTES = 16
SLOT_TOKENS = 64
"""Tokens in a slot, whatever the block size of an engine."""
PROGRESS = 8
"""Index of rank 0's progress in the memory, taken as int64; the other ranks' follow."""


class TransferBuffer:
    """Slots of ``SLOT_TOKENS`` tokens each. The memory begins with a header, which other processes of the host read,
    too: an identity, and the epoch of each slot, which counts its allocations and releases. Threads may share it.

    Args:
        slots: number of slots.
        layer_offsets: byte within a slot at which each layer begins, and the bytes of a slot.
    """

    def __init__(self, slots: int, layer_offsets: Sequence[int]) -> None:
        self.num_slots = slots
        self.layer_offsets = layer_offsets
        self.num_layers = len(layer_offsets) - 1
        self.slot_bytes = slot_bytes = layer_offsets[-1]
        """Bytes of a slot, all layers together."""
        self.offset = data_offset(slots)
        """Bytes before the first slot."""
        self.descriptor = os.memfd_create("penstock-kv-transfer", os.MFD_CLOEXEC)
        self.size = self.offset + slots * slot_bytes
        os.ftruncate(self.descriptor, self.size)  # memory is taken as it is written
        self._memory = mmap.mmap(self.descriptor, self.size)
        self.identity = os.urandom(IDENTITY_BYTES)
        self._memory[:IDENTITY_BYTES] = self.identity
        self.data = np.frombuffer(self._memory, np.uint8)[self.offset :].reshape(slots, slot_bytes)
        """``[slots, slot_bytes]`` uint8."""
        self._epochs = np.frombuffer(self._memory, np.int64)[HEADER_BYTES // 8 :][:slots]
        self._progress = np.frombuffer(self._memory, np.int64)[PROGRESS : HEADER_BYTES // 8]
        self._lock = threading.Lock()
        self._free = list(range(slots))[::-1]

    @property
    def memory(self) -> TransferMemory:
        """What workers need to map the buffer."""
        return TransferMemory(self.path, self.offset, self.num_slots, SLOT_TOKENS, PROGRESS)

    @property
    def path(self) -> str:
        """Where other processes of the same user and host can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def progress(self, rank: int) -> int:
        """The progress of a rank (``ops.LayerExport.progress``)."""
        return int(self._progress[rank])

    def layers(self, slot: int, first: int, last: int) -> memoryview:
        """The memory of layers ``first`` to ``last`` of a slot."""
        return self.data[slot, self.layer_offsets[first] : self.layer_offsets[last]].data

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> tuple[int, int] | None:
        """Slot and epoch; None where no slot is free."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._epochs[slot] += 1
            return slot, int(self._epochs[slot])

    def release(self, slot: int) -> None:
        """Free a slot, which nobody reads or writes any more. Its epoch ends."""
        with self._lock:
            assert slot not in self._free, f"slot {slot} released twice"
            self._epochs[slot] += 1
            self._free.append(slot)

    def holds(self, slot: int, epoch: int) -> bool:
        """Whether a slot has this epoch still."""
        return bool(self._epochs[slot] == epoch)

    def close(self) -> None:
        """Close the descriptor. The memory stays while anything refers to it."""
        os.close(self.descriptor)


def data_offset(slots: int) -> int:
    """Bytes before the first of ``slots`` slots: header and epochs, in whole pages."""
    return HEADER_BYTES + -(-8 * slots // mmap.PAGESIZE) * mmap.PAGESIZE
