"""KV offloading: the host and disk tiers of the prefix cache, and the copies that steps make between the tiers.

A block that a step has filled is stored to the host tier by the next step, and written to the disk tier from there. A
sequence that starts takes its cached blocks from the device, and loads the blocks that follow from the host tier in its
first step. Blocks that only the disk tier has are read into the host tier before the sequence is queued.

A recurrent state takes several slots of the host tier, each of which is evicted and written to the disk like a block.
States are stored at the end of prompts, where prompts diverge, and at the end of outputs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.checkpoint.kv_spec import CANONICAL_LAYOUT, TransferLayout
from penstock.config.options import EngineOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..sequence.plan import OffloadedBlock, OffloadedState, Plan
from .block_hash import state_hashes
from .block_pool import BlockPool
from .disk_tier import DiskTier, PrefixOnDisk
from .host_tier import HostTier
from .snapshots import StateSnapshots

logger = logging.getLogger(__name__)


class StateSlots(NamedTuple):
    """Slots of the host tier that hold a recurrent state."""

    number: int
    """Number of slots, for all ranks; 0 for models without such states."""
    layout: bytes = b""
    """Argument of ``block_hash.state_hashes``."""


NO_STATES = StateSlots(0)


class KVOffloading:
    """The host tier, and optionally the disk tier. Not thread-safe: use it in the thread that runs the steps.

    Args:
        device_pool: blocks of the KV cache.
        disk: the disk tier; None if there is only a host tier.
        snapshots: snapshots of recurrent states; None for models without such states.
    """

    def __init__(
        self,
        device_pool: BlockPool,
        host: HostTier,
        disk: DiskTier | None = None,
        snapshots: StateSnapshots | None = None,
        state_slots: StateSlots = NO_STATES,
    ) -> None:
        self._device_pool = device_pool
        self._host = host
        self._disk = disk
        self._snapshots = snapshots
        self._state_slots = state_slots
        self._finalizer = weakref.finalize(self, _close, host, disk)
        self._pending: dict[int, bytes] = {}
        """Hash of each device block to store."""
        self._pending_states: dict[int, bytes] = {}
        """Hash of the block that ends at each snapshot to store."""
        self._storing: set[bytes] = set()
        """Hashes of blocks that steps in flight store, except blocks that were invalidated since."""
        self.num_queries = 0
        """Number of blocks looked up in the tiers since the start, after a miss in the device's prefix cache."""
        self.num_loaded = 0
        """Number of blocks loaded to the device since the start."""
        self.num_stored = 0
        """Number of blocks stored to the host tier since the start."""
        self.num_state_slots_loaded = 0
        """Number of slots of recurrent states loaded since the start."""
        self.num_state_slots_stored = 0
        """Number of slots of recurrent states stored since the start."""

    # --- Stores -------------------------------------------------------------------------------------------------------

    @property
    def has_stores(self) -> bool:
        """True if there are blocks or states to store."""
        return bool(self._pending or self._pending_states)

    def store(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Store blocks of the device's prefix cache with the next step, except blocks in the host tier. Ignored for
        models without attention, whose blocks are empty."""
        if self._snapshots and not self._snapshots.needs_kv:
            return
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

    def store_state(self, snapshot: int, block_hash: bytes) -> None:
        """Store a snapshot with the next step, except if it is in the host tier.

        Args:
            block_hash: hash of the block that ends at the snapshot.
        """
        if not self._has_state(block_hash):
            self._pending_states[snapshot] = block_hash

    def take_state_stores(self) -> list[OffloadedState]:
        """Take the states to store. The next step has to copy them before it writes to any snapshot. States are omitted
        if their snapshots were overwritten, or if too few slots are free for them."""
        pending, self._pending_states = self._pending_states, {}
        stores = []
        for snapshot, block_hash in pending.items():
            assert self._snapshots
            if self._snapshots.get(block_hash) != snapshot or self._has_state(block_hash):
                continue
            if self._host.num_slots - self._host.num_held < self._state_slots.number:
                break  # ``allocate`` would evict all that is cached for a part of the state
            slots = self._host.allocate(self._state_slots.number)
            if len(slots) < self._state_slots.number:
                self._host.release(slots)
                break
            stores.append(OffloadedState(snapshot, slots, block_hash, list(self._state_hashes(block_hash))))
            self._storing.update(stores[-1].hashes)
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

    def find_state(self, block_hashes: Sequence[bytes]) -> int:
        """The longest prefix of blocks with a recurrent state at its end in the host tier: number of blocks; 0 if there
        is none."""
        return next((count for count in range(len(block_hashes), 0, -1) if self._has_state(block_hashes[count - 1])), 0)

    def load_state(self, block_hash: bytes) -> list[OffloadedState]:
        """Take a snapshot, and add a reference to the slots of a state, so that a step can load it. Empty if the state
        was evicted. ``StateSnapshots.can_take`` must be true."""
        assert self._snapshots
        hashes = list(self._state_hashes(block_hash))
        if not (slots := self.hold(hashes)):
            return []
        snapshot = self._snapshots.take()
        assert snapshot is not None
        return [OffloadedState(snapshot, slots, block_hash, hashes)]

    def release(self, slots: Sequence[int]) -> None:
        """Remove a reference from each of the slots of ``hold``."""
        self._host.release(slots)

    def _has_state(self, block_hash: bytes) -> bool:
        """True if the host tier has all slots of the state after a block."""
        return self._host.count(self._state_hashes(block_hash)) == self._state_slots.number

    def _state_hashes(self, block_hash: bytes) -> Iterator[bytes]:
        return state_hashes(block_hash, *self._state_slots)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def confirm(self, plan: Plan) -> None:
        """Add the copies of a computed step to the prefix cache."""
        stored = [(one.slot, one.block_hash) for one in plan.stores]
        stored += [pair for one in plan.state_stores for pair in zip(one.slots, one.hashes, strict=True)]
        valid = [(slot, one) for slot, one in stored if one in self._storing]
        for slot, block_hash in valid:
            self._host.cache(slot, block_hash)
        for one in plan.loads:
            self._device_pool.cache_block(one.block, one.block_hash)
        for state in plan.state_loads:
            assert self._snapshots
            self._snapshots.put(state.block_hash, state.snapshot)
        self._release(plan)
        self.num_stored += len(plan.stores)
        self.num_loaded += len(plan.loads)
        self.num_state_slots_stored += sum(len(one.slots) for one in plan.state_stores)
        self.num_state_slots_loaded += sum(len(one.slots) for one in plan.state_loads)
        if self._disk:
            self._disk.keep([block_hash for _, block_hash in valid])

    def cancel(self, plan: Plan) -> None:
        """Drop the copies of a failed step."""
        self._release(plan)
        for state in plan.state_loads:
            assert self._snapshots
            self._snapshots.free(state.snapshot)

    def _release(self, plan: Plan) -> None:
        """Release the slots of a step's copies."""
        self._storing.difference_update(one.block_hash for one in plan.stores)
        self._host.release([one.slot for one in (*plan.stores, *plan.loads)])
        for state in plan.state_stores:
            self._storing.difference_update(state.hashes)
        for state in (*plan.state_stores, *plan.state_loads):
            self._host.release(state.slots)

    # --- The tiers ----------------------------------------------------------------------------------------------------

    def touch(self, block_hashes: Sequence[bytes], start: int = 0) -> None:
        """Mark the blocks of a prefix as just used, the first block last, so that the end of a prefix is evicted before
        its beginning. Also marks the last state within the prefix, and that after the first ``start`` blocks."""
        if self._state_slots.number:
            used = dict.fromkeys(count for count in (self.find_state(block_hashes), start) if count)
            states = (self._state_hashes(block_hashes[count - 1]) for count in used if count <= len(block_hashes))
            block_hashes = [*block_hashes, *(one for state in states for one in state)]
        self._host.touch(block_hashes)
        if self._disk:
            self._disk.keep(block_hashes[::-1])

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks from both tiers, because their KV is invalid."""
        block_hashes = [*block_hashes, *(one for block in block_hashes for one in self._state_hashes(block))]
        self._storing.difference_update(block_hashes)
        self._host.forget(block_hashes)
        if self._disk:
            self._disk.forget(block_hashes)

    def clear(self) -> None:
        """Remove all blocks from the host tier. Files of the disk tier are not deleted."""
        self._host.clear()

    def read(self, block_hashes: Sequence[bytes], num_known: int, num_usable: int) -> Future[None] | None:
        """Read a prefix from the disk into the host tier: its blocks, up to the first that is not on the disk, and the
        last recurrent state within them. None if there is nothing to read.

        Args:
            block_hashes: blocks of the prefix.
            num_known: number of leading blocks that the device or the host tier has.
            num_usable: number of leading blocks that end with a state that the device or the host tier has.
        """
        has_states = self._state_slots.number > 0
        if not self._disk or (num_usable if has_states else num_known) == len(block_hashes):
            return None
        state_hashes = self._state_hashes if has_states else None
        return self._disk.read(PrefixOnDisk(block_hashes, num_known, num_usable, state_hashes))

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
            "bytes_stored": (self.num_stored + self.num_state_slots_stored) * size,
            "bytes_loaded": (self.num_loaded + self.num_state_slots_loaded) * size,
            "evictions": self._host.num_evictions,
            "slots": self._host.num_slots,
            "slots_used": self._host.num_cached,
        }
        if disk := self._disk:
            counts |= {
                "disk_hits": disk.num_hits * tokens,
                "disk_bytes_read": (disk.num_hits + disk.num_state_slots) * size,
                "disk_bytes_written": disk.num_written * size,
                "disk_evictions": disk.num_evictions,
                "disk_read_failures": disk.num_read_failures,
                "disk_write_failures": disk.num_write_failures,
            }
        return counts

    def close(self) -> None:
        """Write queued blocks to the disk, and close the host tier. Python also calls this at exit."""
        self._finalizer()


def new_host_tier(options: EngineOptions, layouts: Sequence[TransferLayout], state_bytes: int = 0) -> HostTier | None:
    """Create the host tier; None if the options do not enable it.

    Args:
        layouts: layout of each layer in a slot of ``block_size`` tokens; empty for models without attention, for which
            a slot holds the recurrent state of a rank.
        state_bytes: largest number of bytes of a sequence's recurrent states on a rank.

    Raises ``PenstockError`` with several nodes or Ray, or if the memory is smaller than one block.
    """
    if not options.host_tier_bytes:
        if options.kv_offloading_size or options.kv_offloading_disk_path:
            logger.warning("KV offloading is off, because it needs enable_prefix_caching, which is off")
        return None
    if options.nnodes > 1 or options.distributed_executor_backend == "ray":
        message = "kv_offloading_size: not supported with nnodes > 1 or on Ray; all ranks must be on one node"
        raise PenstockError(Code.UNSUPPORTED, message, "kv_offloading_size")
    slot_bytes = layouts[0].slot_bytes if layouts else state_bytes
    host = HostTier(options.host_tier_bytes, slot_bytes, options.block_size)
    message = "prefix cache: %d %s of %d bytes in host memory"
    logger.info(message, host.num_slots, "blocks" if layouts else "recurrent states", slot_bytes)
    return host


def start_offloading(
    options: EngineOptions,
    layouts: Sequence[TransferLayout],
    fingerprint: str,
    device_pool: BlockPool,
    host: HostTier,
    snapshots: StateSnapshots | None = None,
    state_bytes: int = 0,
    stages: Sequence[range] = (),
) -> KVOffloading:
    """Create a ``KVOffloading``, with the disk tier if the options enable it.

    Args:
        layouts: argument of ``new_host_tier``.
        host: result of ``new_host_tier``.
        fingerprint: ``ModelInfo.fingerprint``.
        device_pool: blocks of the KV cache.
        snapshots: snapshots of recurrent states; None for models without such states.
        state_bytes: argument of ``new_host_tier``.
        stages: layers of each pipeline stage.

    Raises ``PenstockError`` if the disk tier cannot be used.
    """
    ranks = options.tensor_parallel_size
    count = -(-state_bytes // host.slot_bytes) * ranks * options.pipeline_parallel_size
    layout = [ranks, [layers.stop for layers in stages], state_bytes]
    state_slots = StateSlots(count, msgspec.json.encode(layout) if count else b"")
    if host.num_slots < (needed := count + bool(layouts)):
        size = needed * host.slot_bytes
        message = f"must be at least {size} bytes, a recurrent state{' and the KV of one block' if layouts else ''}"
        raise invalid("kv_offloading_size", message, size)
    if not options.kv_offloading_disk_path:
        return KVOffloading(device_pool, host, None, snapshots, state_slots)
    layers = [(layout.kv_heads, layout.vector_bytes, layout.numbers) for layout in layouts]
    identity = msgspec.json.encode([CANONICAL_LAYOUT, options.block_size, fingerprint, layers])
    folder = Path(options.kv_offloading_disk_path).expanduser()
    disk = DiskTier(folder, int(options.kv_offloading_disk_size * 2**30), identity, host)
    return KVOffloading(device_pool, host, disk, snapshots, state_slots)


def _close(host: HostTier, disk: DiskTier | None) -> None:
    if disk:
        disk.close()
    host.close()
