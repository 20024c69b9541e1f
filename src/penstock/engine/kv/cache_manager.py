"""The KV cache manager: allocates, shares, reserves and frees the KV blocks of sequences."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest
from penstock.core.errors import invalid

from ..sequence.plan import OffloadedBlock, OffloadedState
from ..sequence.sequence import Sequence, State
from .block_hash import extend_block_hashes, root_hash
from .block_pool import BlockPool
from .offloading import KVOffloading
from .snapshots import StateSnapshots

SPARE_BLOCKS = 32
"""An import leaves at least the share ``1 / SPARE_BLOCKS`` of all blocks free for running sequences."""
SNAPSHOT_SPACING = 512
"""Smallest number of tokens between snapshots in the middle of a prompt."""


class CacheHit(NamedTuple):
    """Leading tokens of a waiting sequence with existing KV."""

    num_computed: int
    """Number of tokens with existing KV."""
    blocks: list[int]
    """Cached blocks of these tokens on the device; empty for a sequence that is swapped in."""
    num_loaded: int = 0
    """Number of further blocks to load from the host tier of the prefix cache."""
    snapshot: int = -1
    """Snapshot of the recurrent state after these tokens; -1 without recurrent states."""
    loads_state: bool = False
    """True if this state is in the host tier: it is loaded to a snapshot."""
    fork_at: int = 0
    """``Sequence.fork_at``."""


class Loads(NamedTuple):
    """Copies from the host tier in a sequence's first step."""

    blocks: list[OffloadedBlock]
    states: list[OffloadedState]
    """At most one."""


class ImportedPrefix(NamedTuple):
    """Leading tokens of a prompt with KV imported from another engine. The prefix has a reference to each block."""

    num_tokens: int
    """Number of tokens of the prefix."""
    blocks: list[int]
    """KV blocks of the prefix."""
    num_cached: int
    """Number of tokens found in the prefix cache of this engine, or of the engine that exported them."""
    generation: int = 0
    """``KVCacheManager.generation`` when the prefix was imported."""
    snapshot: int = -1
    """Snapshot of the recurrent states after these tokens; -1 without such states."""


class BlockDemand(NamedTuple):
    """Numbers of KV blocks that a waiting sequence needs to start."""

    total: int
    """Length of the block table, with the blocks of the cache hit."""
    from_free: int
    """Number of blocks of ``total`` that are free now, by which ``BlockPool.num_free`` decreases."""
    reserved: int
    """Number of free blocks to reserve beyond ``total`` (``guaranteed_no_evict``)."""


class KVCacheManager:
    """Manages the blocks of sequences on the device.

    Args:
        weights: version of the weights, part of the prefix cache's hashes.
        snapshots: snapshots of recurrent states; None for models without such states.

    Raises ``PenstockError`` (``invalid``) if the device cannot hold a single sequence of ``max_model_len``.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        device_pool: BlockPool,
        weights: str,
        offloading: KVOffloading | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        if device_pool.blocks_for(options.max_model_len) > device_pool.total:
            raise invalid(
                "max_model_len",
                f"{options.max_model_len} tokens do not fit into {device_pool.total} KV blocks of "
                f"{device_pool.block_size} tokens; give the KV cache more memory, or lower max_model_len",
                device_pool.total * device_pool.block_size,
            )
        self._options = options
        self._device_pool = device_pool
        self._weights = weights
        self.offloading = offloading
        """Host and disk tiers of the prefix cache; None without tiers."""
        self.snapshots = snapshots
        """Snapshots of recurrent states; None for models without such states."""
        self._never_evict = options.batch_scheduler_policy == "guaranteed_no_evict"
        self.generation = 0
        """Number of calls of ``forget_contents``."""
        self._reserved = 0
        """Total number of free blocks reserved for running sequences."""
        self._imported: dict[Sequence, ImportedPrefix] = {}
        """Imported prefixes of waiting sequences, the oldest first."""
        self.num_hit_blocks = 0
        """Number of blocks that sequences took from the prefix cache since the engine started."""

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self._device_pool.block_size

    def worst_case_blocks(self, request: EngineRequest) -> int:
        """Maximum number of blocks of a request, reached when all its sequences have their maximum length.

        The sequences share the full blocks of the prompt. If a request has several sequences, it needs one more block
        while the partial block is copied on write. Beams fork in every step, and need one more block each.
        """
        sampling, max_tokens = request.sampling, 0 if request.pooling else request.sampling.max_tokens
        assert max_tokens is not None
        shared = len(request.prompt) // self._device_pool.block_size
        unshared = self._device_pool.blocks_for(len(request.prompt) + max_tokens) - shared
        copies = sampling.num_sequences if sampling.use_beam_search else sampling.num_sequences > 1
        return shared + sampling.num_sequences * unshared + copies

    def set_weights(self, version: str) -> None:
        """Use another version of the weights in hashes, and invalidate the contents of all blocks."""
        self._weights = version
        self.forget_contents()

    def forget_contents(self) -> None:
        """Invalidate the contents of all blocks: empty the prefix cache, and ignore imports that began earlier."""
        self.generation += 1
        self._device_pool.clear_cache()
        if self.snapshots:
            self.snapshots.clear()

    # --- A sequence starts or grows -----------------------------------------------------------------------------------

    def find_cache_hit(self, sequence: Sequence) -> CacheHit:
        """Find the longest prefix of a waiting sequence with existing KV: swapped out, imported or in the prefix cache.
        At least one token remains to be computed."""
        if sequence.state is State.SWAPPED:
            return CacheHit(sequence.num_computed, [])
        if prefix := self._imported.get(sequence):
            return CacheHit(prefix.num_tokens, prefix.blocks, snapshot=prefix.snapshot)
        if not self._options.enable_prefix_caching or sequence.needs_all_hidden_states:
            return CacheHit(0, [])
        self._update_block_hashes(sequence)
        size = self._device_pool.block_size
        hashes = sequence.block_hashes[: (len(sequence.tokens) - 1) // size]
        blocks = self._device_pool.find_longest_hit(hashes)
        num_loaded = self.offloading.count(hashes[len(blocks) :]) if self.offloading else 0
        count = len(blocks) + num_loaded
        if self.snapshots is None:
            return CacheHit(count * size, blocks, num_loaded)
        known = hashes[:count] if self.snapshots.needs_kv else hashes
        usable, snapshot = self.snapshots.find_longest(known)
        more = self.offloading.find_state(known[usable:]) if self.offloading and self.snapshots.can_take else 0
        usable += more
        fork_at = count * size if usable < count else 0
        num_loaded = min(max(usable - len(blocks), 0), num_loaded)
        return CacheHit(usable * size, blocks[:usable], num_loaded, snapshot, more > 0, fork_at)

    def allocate(self, sequence: Sequence, hit: CacheHit, count: int, alone: bool) -> Loads | None:
        """Allocate blocks for a waiting sequence to start: for its cache ``hit``, and for ``count`` tokens after it.

        Args:
            alone: True if no other sequence runs; then ``kv_cache_ratio`` is not enforced.

        Returns:
            Blocks and state to load in the sequence's first step (``Plan.loads``, ``state_loads``). None if not enough
            blocks are free; then the sequence is unchanged.
        """
        pool = self._device_pool
        demand = self._block_demand(sequence, hit, count)
        while demand.from_free + demand.reserved > pool.num_free - self._reserved:
            if not self.drop_import(keep=sequence):
                return None
            demand = self._block_demand(sequence, hit, count)  # the hit may include blocks just released
        if not alone and pool.num_used + demand.from_free > self._options.kv_cache_ratio * pool.total:
            return None
        loaded = range(len(hit.blocks), len(hit.blocks) + hit.num_loaded)
        slots: list[int] = []
        states: list[OffloadedState] = []
        if self.offloading and sequence.state is not State.SWAPPED and sequence not in self._imported:
            slots = self.offloading.hold(sequence.block_hashes[loaded.start : loaded.stop])
            if len(slots) < len(loaded):  # a block was evicted meanwhile
                return None
            if hit.loads_state and not (states := self.offloading.load_state(self._last_hash(sequence, hit))):
                self.offloading.release(slots)
                return None
            self.offloading.num_queries += len(sequence.tokens) // pool.block_size - len(hit.blocks)
        pool.incref(hit.blocks)
        if self.offloading and hit.snapshot >= 0 and sequence not in self._imported:
            self.offloading.store_state(hit.snapshot, self._last_hash(sequence, hit))
        if sequence in self._imported:
            self._drop(sequence)
        else:
            self.num_hit_blocks += len(hit.blocks)
        sequence.snapshot, sequence.fork_at = states[0].snapshot if states else hit.snapshot, hit.fork_at
        sequence.state_slots = states[0].slots if states else []
        sequence.swapped_state = -1
        sequence.blocks = hit.blocks + pool.allocate(demand.total - len(hit.blocks))
        sequence.allocated_blocks += demand.total - len(hit.blocks)
        self._reserve(sequence, demand.reserved)
        blocks = [
            OffloadedBlock(sequence.blocks[index], slot, sequence.block_hashes[index])
            for index, slot in zip(loaded, slots, strict=True)
        ]
        return Loads(blocks, states)

    def _last_hash(self, sequence: Sequence, hit: CacheHit) -> bytes:
        """Hash of the last block of a cache hit."""
        return sequence.block_hashes[hit.num_computed // self._device_pool.block_size - 1]

    def _block_demand(self, sequence: Sequence, hit: CacheHit, count: int) -> BlockDemand:
        """Blocks that a waiting sequence needs for its cache ``hit`` and ``count`` tokens after it."""
        pool = self._device_pool
        total = max(pool.blocks_for(hit.num_computed + count), len(sequence.host_blocks))
        if not sequence.num_output_tokens:
            decode_blocks = self._options.static_decode_blocks
            total = max(total, min(total + decode_blocks, pool.blocks_for(sequence.max_len)))
        from_free = total - len(hit.blocks) + pool.num_free_among(hit.blocks)
        reserved = max(self.worst_case_blocks(sequence.request) - total, 0) if self._never_evict else 0
        return BlockDemand(total, from_free, reserved)

    def num_blocks_to_start(self, sequence: Sequence) -> int:
        """Number of free blocks that a waiting sequence takes or reserves if its first step computes all its tokens."""
        hit = self.find_cache_hit(sequence)
        demand = self._block_demand(sequence, hit, len(sequence.tokens) - hit.num_computed)
        return demand.from_free + demand.reserved

    @property
    def num_blocks_for_starts(self) -> int:
        """Number of free blocks that waiting sequences may take while other sequences run: free blocks that are neither
        reserved nor held back by ``kv_cache_ratio``."""
        pool = self._device_pool
        held_back = pool.total - int(self._options.kv_cache_ratio * pool.total)
        return pool.num_free - max(self._reserved, held_back)

    def num_blocks_to_allocate(self, sequence: Sequence, count: int) -> int:
        """Number of blocks to allocate before ``count`` more tokens of a running sequence can be computed."""
        num_new = self._device_pool.blocks_for(sequence.num_scheduled + count) - len(sequence.blocks)
        return max(num_new, 0) + self._writes_shared(sequence)

    def append_slots(self, sequence: Sequence, num_blocks: int) -> list[tuple[int, int]]:
        """Allocate blocks for the next tokens of a running sequence. Copy on write: if the next token would be written
        to a shared block, one of the new blocks replaces that block.

        Args:
            num_blocks: result of ``num_blocks_to_allocate``.

        Returns the blocks to copy as (source, target).
        """
        if sequence.reserved:
            self._reserve(sequence, sequence.reserved - min(num_blocks, sequence.reserved))
        shared = self._writes_shared(sequence)
        blocks = self._device_pool.allocate(num_blocks)
        sequence.allocated_blocks += num_blocks
        copies = []
        if shared:
            index = sequence.num_scheduled // self._device_pool.block_size
            copies.append((sequence.blocks[index], blocks[0]))
            self._device_pool.release([sequence.blocks[index]])
            sequence.blocks[index] = blocks.pop(0)
            sequence.sent_blocks = min(sequence.sent_blocks, index)
        sequence.blocks += blocks
        return copies

    def cache_full_blocks(self, sequence: Sequence, start: int, end: int, new_token_ids: list[int]) -> None:
        """Add blocks to the prefix cache that are full after tokens ``start`` to ``end`` were computed.

        Args:
            new_token_ids: tokens that are about to be appended to ``sequence.tokens``; some may be computed already.
        """
        size = self._device_pool.block_size
        if self._options.enable_prefix_caching and start // size < end // size:
            self._update_block_hashes(sequence, new_token_ids)
            filled = slice(start // size, end // size)
            blocks, hashes = sequence.blocks[filled], sequence.block_hashes[filled]
            for block, block_hash in zip(blocks, hashes, strict=True):
                self._device_pool.cache_block(block, block_hash)
            if self.offloading:
                self.offloading.store(blocks, hashes)

    def take_snapshots(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Snapshots of the recurrent state to make while tokens ``start`` to ``end`` are computed: at the last block
        boundary before the end of the known tokens, where keys and values of other sequences were found
        (``Sequence.fork_at``), and at each block boundary within the output, where the new snapshot replaces the last.
        In the middle of a prompt, one at the end of the step, at a multiple of ``SNAPSHOT_SPACING``, which does not
        overwrite another.

        Returns the number of tokens that each state includes, and the snapshot.
        """
        if not self.snapshots:
            return []
        size = self._device_pool.block_size
        wanted = [len(sequence.tokens)] if sequence.exports_state else []  # first: a transfer cannot do without it
        optional = 0
        if self._options.enable_prefix_caching:
            wanted += [(len(sequence.tokens) - 1) // size * size, sequence.fork_at]
            spacing = max(SNAPSHOT_SPACING // size, 1) * size
            if end < len(sequence.tokens):
                optional = end // spacing * spacing
            elif end % size == 0 and end > sequence.prompt_length:
                wanted.append(end)
        taken: dict[int, int | None] = {at: self.snapshots.take() for at in dict.fromkeys(wanted) if start < at <= end}
        if start < optional <= end and optional not in taken and self.snapshots.has_free:
            taken[optional] = self.snapshots.take()
        return sorted((at, snapshot) for at, snapshot in taken.items() if snapshot is not None)

    def keep_snapshots(self, sequence: Sequence, made: Iterable[tuple[int, int]], valid: bool) -> None:
        """Keep the snapshots of ``take_snapshots`` for other sequences, after ``cache_full_blocks``; free them if they
        are not ``valid``."""
        for at, snapshot in made:
            assert self.snapshots
            if sequence.exports_state and at == sequence.prompt_length and valid:
                sequence.exported_snapshot = snapshot
                continue
            size = self._device_pool.block_size
            index = at // size - 1
            if not valid or index >= len(sequence.block_hashes):
                self.snapshots.free(snapshot)
                continue
            self.snapshots.put(sequence.block_hashes[index], snapshot)
            if at > sequence.prompt_length:
                if sequence.last_snapshot != sequence.block_hashes[index]:
                    self.snapshots.forget(sequence.last_snapshot)
                sequence.last_snapshot = sequence.block_hashes[index]
            elif self.offloading and at in ((sequence.prompt_length - 1) // size * size, sequence.fork_at):
                self.offloading.store_state(snapshot, sequence.block_hashes[index])

    def uncache(self, sequence: Sequence) -> None:
        """Remove all blocks of a sequence from the prefix cache, because their KV is invalid."""
        self._device_pool.uncache(sequence.blocks)
        if self.snapshots:
            for block_hash in sequence.block_hashes:
                self.snapshots.forget(block_hash)
        if self.offloading:
            self.offloading.forget(sequence.block_hashes)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, on the device and in the host tier. Files of the disk tier are not deleted."""
        self._device_pool.clear_cache()
        if self.snapshots:
            self.snapshots.clear()
        if self.offloading:
            self.offloading.clear()

    # --- KV moves between tiers of the prefix cache -------------------------------------------------------------------

    def read_prefix(self, request: EngineRequest) -> Future[None] | None:
        """Start to read blocks of a prompt that only the disk tier has into the host tier. None if there is nothing to
        read."""
        sampling = request.sampling
        if not self.offloading or sampling.prompt_logprobs is not None or sampling.return_context_logits:
            return None
        hashes = self.prompt_hashes(request, len(request.prompt) - 1)
        num_known = len(self._device_pool.find_longest_hit(hashes))
        num_known += self.offloading.count(hashes[num_known:])
        num_usable = 0
        if self.snapshots:
            num_known = num_known if self.snapshots.needs_kv else len(hashes)
            num_usable = self.snapshots.find_longest(hashes[:num_known])[0]
            num_usable += self.offloading.find_state(hashes[num_usable:num_known])
        return self.offloading.read(hashes, num_known, num_usable)

    # --- KV is imported from or exported to another engine ------------------------------------------------------------

    def slot_mapping(self, blocks: list[int], start: int, end: int) -> np.ndarray:
        """KV cache slots of tokens ``start`` to ``end`` of a sequence with these blocks, ``[end - start]`` int64."""
        positions, size = np.arange(start, end), self._device_pool.block_size
        return np.asarray(blocks, np.int64)[positions // size] * size + positions % size

    def prompt_hashes(self, request: EngineRequest, num_tokens: int) -> list[bytes]:
        """Hashes of the full blocks among the first ``num_tokens`` tokens of a prompt."""
        hashes: list[bytes] = []
        root = root_hash(self._weights, request.adapter, request.cache_salt)
        extend_block_hashes(hashes, root, request.prompt[:num_tokens], self._device_pool.block_size, request.images)
        return hashes

    def begin_import(self, hashes: list[bytes], num_tokens: int, min_tokens: int) -> tuple[int, list[int]] | None:
        """Allocate blocks for the first ``num_tokens`` tokens of a prompt, which another engine computes.

        Args:
            hashes: ``prompt_hashes`` of these tokens.
            min_tokens: minimum number of uncached tokens for an import.

        Returns:
            Number of leading tokens in the prefix cache, and the blocks of all tokens, with one reference each. The
            blocks of the cached tokens must not be written. The list is empty if fewer than ``min_tokens`` tokens would
            have to be computed here. None if not enough blocks are free.
        """
        pool = self._device_pool
        hit = pool.find_longest_hit(hashes)
        num_cached = num_usable = len(hit) * pool.block_size
        if self.snapshots:  # blocks after the last state are no use
            count = self.snapshots.find_longest(hashes[: len(hit)])[0]
            count += self.offloading.find_state(hashes[count : len(hit)]) if self.offloading else 0
            num_usable = count * pool.block_size
        if num_tokens - num_usable < max(min_tokens, 1):
            return num_usable, []
        count = pool.blocks_for(num_tokens) - len(hit)
        from_free = count + pool.num_free_among(hit)
        if pool.num_used:
            spare = pool.total // SPARE_BLOCKS
            if pool.num_used + from_free > min(self._options.kv_cache_ratio * pool.total, pool.total - spare):
                return None
        if from_free > pool.num_free - self._reserved:
            return None
        pool.incref(hit)
        return num_cached, hit + pool.allocate(count)

    def finish_import(
        self, hashes: list[bytes], blocks: list[int], num_tokens: int, num_cached: int, snapshot: int = -1
    ) -> ImportedPrefix:
        """Add the blocks of ``begin_import`` to the prefix cache. Call this after they are written."""
        for block, block_hash in zip(blocks, hashes, strict=False):
            self._device_pool.cache_block(block, block_hash)
        if self.offloading:
            self.offloading.store(blocks[: len(hashes)], hashes)
        return ImportedPrefix(num_tokens, blocks, num_cached, self.generation, snapshot)

    def attach_import(self, sequence: Sequence, prefix: ImportedPrefix) -> None:
        """Let a waiting sequence start with an imported prefix. Releases the prefix if its contents are outdated."""
        if prefix.generation != self.generation:
            self.release_import(prefix)
            return
        self._imported[sequence] = prefix
        sequence.num_imported = prefix.num_cached

    def release_import(self, prefix: ImportedPrefix) -> None:
        """Release a prefix that is not attached to a sequence."""
        self._device_pool.release(prefix.blocks)
        if self.snapshots and prefix.snapshot >= 0:
            self.snapshots.free(prefix.snapshot)

    def release_imported(self, sequence: Sequence) -> None:
        """Release the imported prefix of a waiting sequence; ignored if it has no imported prefix."""
        if sequence in self._imported:
            self._drop(sequence)

    def drop_import(self, keep: Sequence | None = None) -> bool:
        """Release the imported prefix that was attached last, to a sequence other than ``keep``. Its blocks remain in
        the prefix cache until they are reused. Returns False if no other sequence has an imported prefix."""
        sequence = next((one for one in reversed(self._imported) if one is not keep), None)
        if sequence:
            self._drop(sequence)
        return sequence is not None

    def _drop(self, sequence: Sequence) -> None:
        """Release the imported prefix of a sequence."""
        self.release_import(self._imported.pop(sequence))

    # --- A sequence is forked -----------------------------------------------------------------------------------------

    def fork(self, first: Sequence, index: int) -> Sequence:
        """Fork ``first``: create sequence ``index`` of its request as a copy with the same blocks."""
        shared = first.blocks[: self._device_pool.blocks_for(first.num_scheduled)]
        sibling = first.fork(index, shared)
        self._device_pool.incref(shared)
        if self._never_evict:
            unshared = self._device_pool.blocks_for(first.max_len) - first.num_scheduled // self._device_pool.block_size
            self._reserve(first, first.reserved - unshared)
            self._reserve(sibling, unshared)
        return sibling

    def reorder_beams(self, beams: list[Sequence], parents: list[int], token_ids: list[int]) -> None:
        """Replace each beam ``i`` by beam ``parents[i]``, with the same blocks, and append ``token_ids[i]``."""
        old = [(beam.tokens, beam.blocks, beam.block_hashes) for beam in beams]
        for beam, parent, token in zip(beams, parents, token_ids, strict=True):
            tokens, blocks, block_hashes = old[parent]
            shared = blocks[: self._device_pool.blocks_for(beam.num_scheduled)]
            self._device_pool.incref(shared)
            beam.tokens, beam.blocks, beam.block_hashes = [*tokens, token], shared, block_hashes.copy()
            beam.sent_blocks = len(shared)
        for beam, (_, blocks, _) in zip(beams, old, strict=True):
            self._device_pool.release(blocks)
            if self._never_evict:
                shared_blocks = beam.num_scheduled // self._device_pool.block_size
                self._reserve(beam, self._device_pool.blocks_for(beam.max_len) - shared_blocks)

    # --- A sequence stops ---------------------------------------------------------------------------------------------

    def unreserve(self, sequence: Sequence) -> None:
        """Cancel the reservation of a sequence."""
        self._reserve(sequence, 0)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks on the device."""
        if self.offloading and sequence.block_hashes:
            start = (sequence.num_cached_tokens or 0) // self._device_pool.block_size
            self.offloading.touch(sequence.block_hashes[: len(sequence.blocks)], start)
            if self.snapshots and (snapshot := self.snapshots.get(sequence.last_snapshot)) is not None:
                self.offloading.store_state(snapshot, sequence.last_snapshot)
        self._device_pool.release(sequence.blocks)
        sequence.blocks = []

    def _update_block_hashes(self, sequence: Sequence, new_token_ids: list[int] | None = None) -> None:
        """Hash the full blocks of a sequence's tokens followed by ``new_token_ids``."""
        request = sequence.request
        start = b"" if sequence.block_hashes else root_hash(self._weights, request.adapter, request.cache_salt)
        tokens = sequence.tokens + new_token_ids if new_token_ids else sequence.tokens
        extend_block_hashes(sequence.block_hashes, start, tokens, self._device_pool.block_size, request.images)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """True if the next token would be written to a block with several references."""
        block, filled = divmod(sequence.num_scheduled, self._device_pool.block_size)
        return bool(filled) and self._device_pool.ref_count(sequence.blocks[block]) > 1

    def _reserve(self, sequence: Sequence, blocks: int) -> None:
        """Set the number of free blocks reserved for a sequence."""
        self._reserved += blocks - sequence.reserved
        sequence.reserved = blocks
