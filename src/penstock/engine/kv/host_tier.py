"""The host tier of the prefix cache: blocks in host memory that the engine shares with its workers."""

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
"""Bytes before the first slot: the ranks' progress, as in a transfer buffer."""


class HostTier:
    """Slots that hold a block each, all layers and heads, in the canonical layout (``TransferLayout``). The least
    recently used one that nobody holds is evicted first.

    Threads may share it: a slot is read and written only by those who hold it.

    Args:
        size: bytes of memory, which are taken as they are written.
        slot_bytes: bytes of a slot.
        block_size: tokens of a block.

    Raises ``PenstockError`` (``invalid``) if there is no room for a single block.
    """

    def __init__(self, size: int, slot_bytes: int, block_size: int) -> None:
        if size < slot_bytes:
            raise invalid("kv_offloading_size", f"must be at least {slot_bytes} bytes, the KV of one block", slot_bytes)
        self.slot_bytes = slot_bytes
        self._pool = BlockPool(size // slot_bytes, block_size)
        self._lock = threading.Lock()
        self._descriptor = os.memfd_create("penstock-host-tier", os.MFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        length = HEADER_BYTES + self._pool.total * slot_bytes
        os.ftruncate(self._descriptor, length)
        memory = np.frombuffer(mmap.mmap(self._descriptor, length), np.uint8)
        self.data = memory[HEADER_BYTES:].reshape(-1, slot_bytes)
        """``[slots, slot_bytes]`` uint8."""

    @property
    def memory(self) -> TransferMemory:
        """What workers need to map the slots."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return TransferMemory(path, HEADER_BYTES, self._pool.total, self._pool.block_size, 0)

    @property
    def num_slots(self) -> int:
        return self._pool.total

    @property
    def num_cached(self) -> int:
        """Number of slots that hold a cached block."""
        return self._pool.num_cached

    @property
    def num_held(self) -> int:
        """Number of slots that somebody holds."""
        return self._pool.num_used

    @property
    def num_evictions(self) -> int:
        """Number of cached blocks that were evicted since the start."""
        return self._pool.num_evictions

    def count(self, block_hashes: Iterable[bytes]) -> int:
        """Number of leading hashes whose blocks are here."""
        with self._lock:
            return len(self._pool.find_longest_hit(block_hashes))

    def hold(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Hold the slots of the leading hashes whose blocks are here."""
        with self._lock:
            slots = self._pool.find_longest_hit(block_hashes)
            self._pool.incref(slots)
            return slots

    def allocate(self, count: int) -> list[int]:
        """Hold slots to write, which are not cached any more: ``count``, or fewer if others are held."""
        with self._lock:
            return self._pool.allocate(min(count, self._pool.num_free))

    def cache(self, slot: int, block_hash: bytes) -> None:
        """Add a slot, which is held and written, to the cache."""
        with self._lock:
            self._pool.cache_block(slot, block_hash)

    def release(self, slots: Sequence[int]) -> None:
        """Hold slots no more.

        Args:
            slots: in the order of the tokens, so that the end of a prefix is evicted before its beginning.
        """
        with self._lock:
            self._pool.release(slots)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Mark the blocks of a prefix that are here as used now."""
        with self._lock:
            slots = [slot for one in block_hashes if (slot := self._pool.cached_block(one)) is not None]
            self._pool.incref(slots)
            self._pool.release(slots)

    def contains(self, block_hash: bytes) -> bool:
        """True if a block is here."""
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
        """Close the descriptor. The memory stays while anything refers to it."""
        self._finalizer()
