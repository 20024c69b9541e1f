"""KV offloading: the host and disk tiers of the prefix cache, and the copies that steps make between the tiers.

A block that a step has filled is stored to the host tier by the next step, and written to the disk tier from there. A
sequence that starts takes its cached blocks from the device, and loads the blocks that follow from the host tier in its
first step. Blocks that only the disk tier has are read into the host tier before the sequence is queued.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.kv_spec import CANONICAL_LAYOUT, TransferLayout
from penstock.config.options import EngineOptions
from penstock.core import Code, PenstockError

from ..sequence.plan import OffloadedBlock
from .block_pool import BlockPool
from .disk_tier import DiskTier
from .host_tier import HostTier

logger = logging.getLogger(__name__)


class KVOffloading:
    """The host tier, and optionally the disk tier. Not thread-safe: use it in the thread that runs the steps.

    Args:
        device_pool: blocks of the KV cache.
        disk: the disk tier; None if there is only a host tier.
    """

    def __init__(self, device_pool: BlockPool, host: HostTier, disk: DiskTier | None = None) -> None:
        self._device_pool = device_pool
        self._host = host
        self._disk = disk
        self._finalizer = weakref.finalize(self, _close, host, disk)
        self._pending: dict[int, bytes] = {}
        """Hash of each device block to store."""
        self._storing: set[bytes] = set()
        """Hashes of blocks that steps in flight store, except blocks that were invalidated since."""
        self.num_queries = 0
        """Number of blocks looked up in the tiers since the start, after a miss in the device's prefix cache."""
        self.num_loaded = 0
        """Number of blocks loaded to the device since the start."""
        self.num_stored = 0
        """Number of blocks stored to the host tier since the start."""

    # --- Stores -------------------------------------------------------------------------------------------------------

    @property
    def has_stores(self) -> bool:
        """True if there are blocks to store."""
        return bool(self._pending)

    def store(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Store blocks of the device's prefix cache with the next step, except blocks in the host tier."""
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if not self._host.contains(block_hash):
                self._pending[block] = block_hash

    def take_stores(self) -> list[OffloadedBlock]:
        """Take the blocks to store. The next step has to copy them before it writes to any block. Blocks are omitted if
        they have left the device's prefix cache, or if no slot is free for them."""
        pool, pending, self._pending = self._device_pool, self._pending, {}
        cached = [(b, h) for b, h in pending.items() if pool.cached_block(h) == b and not self._host.contains(h)]
        slots = self._host.allocate(len(cached))
        stores = [OffloadedBlock(block, slot, one) for (block, one), slot in zip(cached, slots, strict=False)]
        self._storing.update(one.block_hash for one in stores)
        return stores

    # --- Loads --------------------------------------------------------------------------------------------------------

    def count(self, block_hashes: Sequence[bytes]) -> int:
        """Number of leading ``block_hashes`` in the host tier."""
        return self._host.count(block_hashes)

    def hold(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Add a reference to the slots of all these blocks, so that a step can load them. Returns the slots. If a block
        was evicted, adds no references and returns an empty list."""
        slots = self._host.hold(block_hashes)
        if len(slots) < len(block_hashes):
            self._host.release(slots)
            return []
        return slots

    # --- Steps --------------------------------------------------------------------------------------------------------

    def confirm(self, stores: list[OffloadedBlock], loads: list[OffloadedBlock]) -> None:
        """Add the copies of a computed step to the prefix cache: ``stores`` in the host tier, ``loads`` on the
        device."""
        valid = [one for one in stores if one.block_hash in self._storing]
        for one in valid:
            self._host.cache(one.slot, one.block_hash)
        for one in loads:
            self._device_pool.cache_block(one.block, one.block_hash)
        self.cancel(stores, loads)
        self.num_stored += len(stores)
        self.num_loaded += len(loads)
        if self._disk:
            self._disk.keep([one.block_hash for one in valid])

    def cancel(self, stores: list[OffloadedBlock], loads: list[OffloadedBlock]) -> None:
        """Drop the copies of a failed step."""
        self._storing.difference_update(one.block_hash for one in stores)
        self._host.release([one.slot for one in stores])
        self._host.release([one.slot for one in loads])

    # --- The tiers ----------------------------------------------------------------------------------------------------

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Mark the blocks of a prefix as just used, the first block last, so that the end of a prefix is evicted before
        its beginning."""
        self._host.touch(block_hashes)
        if self._disk:
            self._disk.keep(block_hashes[::-1])

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks from both tiers, because their KV is invalid."""
        self._storing.difference_update(block_hashes)
        self._host.forget(block_hashes)
        if self._disk:
            self._disk.forget(block_hashes)

    def clear(self) -> None:
        """Remove all blocks from the host tier. Files of the disk tier are not deleted."""
        self._host.clear()

    def read(self, block_hashes: Sequence[bytes]) -> Future[None] | None:
        """Read blocks from the disk into the host tier (``DiskTier.read``). None if there is nothing to read."""
        return self._disk.read(block_hashes) if self._disk and block_hashes else None

    def poll(self) -> None:
        """Complete timed-out reads (``DiskTier.poll``)."""
        if self._disk:
            self._disk.poll()

    @property
    def counts(self) -> dict[str, Any]:
        """Counters since the start, and the usage of the host tier, by field of ``Stats`` without ``offload_``."""
        tokens, size = self._device_pool.block_size, self._host.slot_bytes
        counts: dict[str, Any] = {
            "queries": self.num_queries * tokens,
            "hits": self.num_loaded * tokens,
            "bytes_stored": self.num_stored * size,
            "bytes_loaded": self.num_loaded * size,
            "evictions": self._host.num_evictions,
            "slots": self._host.num_slots,
            "slots_used": self._host.num_cached,
        }
        if disk := self._disk:
            counts |= {
                "disk_hits": disk.num_hits * tokens,
                "disk_bytes_read": disk.num_hits * size,
                "disk_bytes_written": disk.num_written * size,
                "disk_evictions": disk.num_evictions,
                "disk_read_failures": disk.num_read_failures,
                "disk_write_failures": disk.num_write_failures,
            }
        return counts

    def close(self) -> None:
        """Write queued blocks to the disk, and close the host tier. Python also calls this at exit."""
        self._finalizer()


def new_host_tier(options: EngineOptions, layouts: Sequence[TransferLayout]) -> HostTier | None:
    """Create the host tier; None if the options do not enable it.

    Args:
        layouts: layout of each layer in a slot of ``block_size`` tokens.

    Raises ``PenstockError`` with several nodes or Ray, or if the memory is smaller than one block.
    """
    if not options.host_tier_bytes:
        if options.kv_offloading_size or options.kv_offloading_disk_path:
            logger.warning("KV offloading is off, because it needs enable_prefix_caching, which is off")
        return None
    if options.nnodes > 1 or options.distributed_executor_backend == "ray":
        message = "kv_offloading_size: not supported with nnodes > 1 or on Ray; all ranks must be on one node"
        raise PenstockError(Code.UNSUPPORTED, message, "kv_offloading_size")
    host = HostTier(options.host_tier_bytes, layouts[0].slot_bytes, options.block_size)
    logger.info("prefix cache: %d blocks of %d bytes in host memory", host.num_slots, host.slot_bytes)
    return host


def start_offloading(
    options: EngineOptions, layouts: Sequence[TransferLayout], fingerprint: str, device_pool: BlockPool, host: HostTier
) -> KVOffloading:
    """Create a ``KVOffloading``, with the disk tier if the options enable it.

    Args:
        layouts: argument of ``new_host_tier``.
        host: result of ``new_host_tier``.
        fingerprint: ``ModelInfo.fingerprint``.
        device_pool: blocks of the KV cache.

    Raises ``PenstockError`` if the disk tier cannot be used.
    """
    if not options.kv_offloading_disk_path:
        return KVOffloading(device_pool, host)
    layers = [(layout.kv_heads, layout.vector_bytes, layout.numbers) for layout in layouts]
    identity = msgspec.json.encode([CANONICAL_LAYOUT, options.block_size, fingerprint, layers])
    folder = Path(options.kv_offloading_disk_path).expanduser()
    disk = DiskTier(folder, int(options.kv_offloading_disk_size * 2**30), identity, host)
    return KVOffloading(device_pool, host, disk)


def _close(host: HostTier, disk: DiskTier | None) -> None:
    if disk:
        disk.close()
    host.close()
