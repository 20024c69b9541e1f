"""The transfer buffer: keys and values in the canonical layout, in memory shared by an engine and its workers."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from ..step import TransferMemory

HEADER_BYTES = 16384
"""Byte offset of the slots' epochs. The header before the epochs has the identity and, from ``PROGRESS`` on, the ranks'
progress."""
IDENTITY_BYTES = 16
"""Bytes of the random identity of a buffer."""
SLOT_TOKENS = 64
"""Number of tokens per slot, independent of an engine's block size."""
PROGRESS = 8
"""Offset of rank 0's progress, in int64 elements. The progress of ranks 1, 2, … follows."""


class TransferBuffer:
    """Slots of ``SLOT_TOKENS`` tokens each. Thread-safe.

    The memory begins with a header, which other processes on the host read: a random identity, the ranks' progress,
    and the epoch of each slot, which counts its allocations and releases.

    Args:
        slots: number of slots.
        layer_offsets: byte offset of each layer within a slot, followed by the size of a slot.
        state_slots: number of slots that the recurrent states of a sequence take.
        has_tokens: False for a model without keys and values: a transfer has the slots of its states only.
    """

    def __init__(self, slots: int, layer_offsets: Sequence[int], state_slots: int = 0, has_tokens: bool = True) -> None:
        self.num_slots = slots
        self.state_slots = state_slots
        """Number of slots of a transfer that follow those of its tokens, and hold the states after them."""
        self.has_tokens = has_tokens
        self.layer_offsets = layer_offsets
        self.num_layers = len(layer_offsets) - 1
        self.slot_bytes = slot_bytes = layer_offsets[-1]
        """Size of a slot, all layers together, bytes."""
        self.offset = data_offset(slots)
        """Byte offset of the first slot."""
        self.descriptor = os.memfd_create("penstock-kv-transfer", os.MFD_CLOEXEC)
        self.size = self.offset + slots * slot_bytes
        os.ftruncate(self.descriptor, self.size)  # pages are allocated when first written
        self._memory = mmap.mmap(self.descriptor, self.size)
        self.identity = os.urandom(IDENTITY_BYTES)
        self._memory[:IDENTITY_BYTES] = self.identity
        self.data = np.frombuffer(self._memory, np.uint8)[self.offset :].reshape(slots, slot_bytes)
        """Contents of the slots, ``[slots, slot_bytes]`` uint8."""
        self._epochs = np.frombuffer(self._memory, np.int64)[HEADER_BYTES // 8 :][:slots]
        """Epoch of each slot."""
        self._progress = np.frombuffer(self._memory, np.int64)[PROGRESS : HEADER_BYTES // 8]
        """Progress of each rank."""
        self._lock = threading.Lock()
        self._free = list(range(slots))[::-1]

    def token_slots(self, count: int) -> int:
        """Number of slots of ``count`` tokens; the last one may be partial."""
        return -(-count // SLOT_TOKENS) if self.has_tokens else 0

    @property
    def memory(self) -> TransferMemory:
        """Path and layout of the buffer, for workers to map it."""
        return TransferMemory(self.path, self.offset, self.num_slots, SLOT_TOKENS, self.slot_bytes, PROGRESS)

    @property
    def path(self) -> str:
        """Path at which other processes of the same user and host can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def progress(self, rank: int) -> int:
        """Progress of a rank in the current step (``ops.LayerExport.progress``)."""
        return int(self._progress[rank])

    def layers(self, slot: int, first: int, last: int) -> memoryview:
        """Memory of layers ``first`` to ``last`` (exclusive) of a slot."""
        return self.data[slot, self.layer_offsets[first] : self.layer_offsets[last]].data

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def allocate(self) -> tuple[int, int] | None:
        """Allocate a slot. Returns the slot and its epoch; None if no slot is free."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._epochs[slot] += 1
            return slot, int(self._epochs[slot])

    def release(self, slot: int) -> None:
        """Free a slot and end its epoch. No thread or worker may still use the slot."""
        with self._lock:
            assert slot not in self._free, f"slot {slot} released twice"
            self._epochs[slot] += 1
            self._free.append(slot)

    def holds(self, slot: int, epoch: int) -> bool:
        """True if the epoch of a slot is ``epoch``: the slot was not released since it was allocated."""
        return bool(self._epochs[slot] == epoch)

    def close(self) -> None:
        """Close the file descriptor. The memory is freed when the last reference to it is dropped."""
        os.close(self.descriptor)


def data_offset(slots: int) -> int:
    """Byte offset of the first of ``slots`` slots: size of header and epochs, rounded up to pages."""
    return HEADER_BYTES + -(-8 * slots // mmap.PAGESIZE) * mmap.PAGESIZE
