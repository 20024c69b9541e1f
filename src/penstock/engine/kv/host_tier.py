"""The host tier of the prefix cache: blocks in host memory, shared by the engine and its workers."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from penstock.core.errors import invalid

from ..step import TransferMemory
from .block_pool import BlockPool

HEADER_BYTES = 16384
"""Byte offset of the first slot. The header has the layout of a transfer buffer's header (progress of the ranks)."""


class HostTier:
    """Slots of one block each, with all layers and heads, in the canonical layout (``TransferLayout``), or with a part
    of a recurrent state. The least recently used slot without references is evicted first.

    Thread-safe. The holder of a reference (``hold``, ``allocate``) may access the slot's data.

    Args:
        size: bytes of memory; pages are allocated when they are first written.
        slot_bytes: bytes per slot.
        block_size: tokens per block.

    Raises ``PenstockError`` (``invalid``) if ``size`` is less than a slot.
    """

    def __init__(self, size: int, slot_bytes: int, block_size: int) -> None:
        if size < slot_bytes:
            message = f"must be at least {slot_bytes} bytes, one slot of the host tier, is {size} bytes"
            raise invalid("kv_offloading_size", message, slot_bytes)
        self.slot_bytes = slot_bytes
        self._pool = BlockPool(size // slot_bytes, block_size)
        self._lock = threading.Lock()
        self._descriptor = os.memfd_create("penstock-host-tier", os.MFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        length = HEADER_BYTES + self._pool.total * slot_bytes
        os.ftruncate(self._descriptor, length)
        memory = np.frombuffer(mmap.mmap(self._descriptor, length), np.uint8)
        self.data = memory[HEADER_BYTES:].reshape(-1, slot_bytes)
        """Contents of the slots, ``[slots, slot_bytes]`` uint8."""

    @property
    def memory(self) -> TransferMemory:
        """Path and layout of the memory, for workers to map it."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return TransferMemory(path, HEADER_BYTES, self._pool.total, self._pool.block_size, self.slot_bytes, 0)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self._pool.total

    @property
    def num_cached(self) -> int:
        """Number of slots that hold a cached block."""
        return self._pool.num_cached

    @property
    def num_held(self) -> int:
        """Number of slots with references."""
        return self._pool.num_used

    @property
    def num_evictions(self) -> int:
        """Number of cached blocks that were evicted since the start."""
        return self._pool.num_evictions

    def count(self, block_hashes: Iterable[bytes]) -> int:
        """Number of leading ``block_hashes`` in the cache."""
        with self._lock:
            return len(self._pool.find_longest_hit(block_hashes))

    def hold(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Add a reference to the slots of the leading ``block_hashes`` in the cache. Returns these slots."""
        with self._lock:
            slots = self._pool.find_longest_hit(block_hashes)
            self._pool.incref(slots)
            return slots

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` slots for writing, or all free slots if fewer are free. Each slot has one reference."""
        with self._lock:
            return self._pool.allocate(min(count, self._pool.num_free))

    def cache(self, slot: int, block_hash: bytes) -> None:
        """Add an allocated slot to the cache, after it was written."""
        with self._lock:
            self._pool.cache_block(slot, block_hash)

    def release(self, slots: Sequence[int]) -> None:
        """Remove a reference from each slot.

        Args:
            slots: slots in the order of the tokens, so that the end of a prefix is evicted before its beginning.
        """
        with self._lock:
            self._pool.release(slots)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Mark the cached blocks of a prefix as just used."""
        with self._lock:
            slots = [slot for one in block_hashes if (slot := self._pool.cached_block(one)) is not None]
            self._pool.incref(slots)
            self._pool.release(slots)

    def contains(self, block_hash: bytes) -> bool:
        """True if a block is cached."""
        with self._lock:
            return self._pool.cached_block(block_hash) is not None

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """Remove blocks from the cache."""
        with self._lock:
            self._pool.uncache(s for one in block_hashes if (s := self._pool.cached_block(one)) is not None)

    def clear(self) -> None:
        """Remove all blocks from the cache."""
        with self._lock:
            self._pool.clear_cache()

    def close(self) -> None:
        """Close the file descriptor. The memory is freed once it is unmapped everywhere."""
        self._finalizer()
