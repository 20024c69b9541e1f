"""The KV cache manager: allocates, shares, reserves and frees the KV blocks of sequences."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest
from penstock.core.errors import invalid

from ..sequence.plan import OffloadedBlock
from ..sequence.sequence import Sequence, State
from .block_hash import extend_block_hashes, root_hash
from .block_pool import BlockPool
from .offloading import KVOffloading

SPARE_BLOCKS = 32
"""One of so many blocks is left free for running sequences when blocks for an import are allocated."""


class CacheHit(NamedTuple):
    """Leading tokens of a waiting sequence whose keys and values exist, and need not be computed."""

    num_computed: int
    """Number of these tokens."""
    blocks: list[int]
    """Blocks of the prefix cache that hold them; empty for a sequence that is swapped in."""
    num_loaded: int = 0
    """Number of blocks that follow these in the host tier of the prefix cache."""


class ImportedPrefix(NamedTuple):
    """Leading tokens of a prompt whose keys and values came from another engine, in blocks with a reference each."""

    num_tokens: int
    blocks: list[int]
    num_cached: int
    """Number of these tokens that were in this engine's prefix cache or in the other's."""
    generation: int = 0
    """``KVCacheManager.generation`` when they were imported."""


class BlockDemand(NamedTuple):
    """Numbers of KV blocks that a waiting sequence needs to start."""

    total: int
    """Blocks of its block table, those of its cache hit included."""
    from_free: int
    """How many of ``total`` are free now: ``BlockPool.num_free`` falls by it."""
    reserved: int
    """Free blocks to reserve for it beyond ``total`` (``guaranteed_no_evict``)."""


class KVCacheManager:
    """Blocks of sequences, on the device and in the host tier.

    Args:
        host_pool: blocks of the host tier, to which sequences are swapped; None if there is none.
        weights: version of the weights, part of the prefix cache's hashes.

    Raises ``PenstockError`` (``invalid``) if the device cannot hold a single sequence of ``max_model_len``.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        device_pool: BlockPool,
        host_pool: BlockPool | None,
        weights: str,
        offloading: KVOffloading | None = None,
    ) -> None:
        if device_pool.blocks_for(options.max_model_len) > device_pool.total:
            raise invalid(
                "max_model_len",
                f"{options.max_model_len} tokens do not fit into {device_pool.total} KV blocks of "
                f"{device_pool.block_size}. "
                "Give the cache more memory, or lower max_model_len.",
                device_pool.total * device_pool.block_size,
            )
        self._options = options
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._weights = weights
        self.offloading = offloading
        """Lower tiers of the prefix cache; None if there are none."""
        self._never_evict = options.batch_scheduler_policy == "guaranteed_no_evict"
        self.generation = 0
        """Number of times that the contents of blocks were forgotten."""
        self._reserved = 0
        self._imported: dict[Sequence, ImportedPrefix] = {}
        """Prefixes of waiting sequences, the oldest first."""
        self.num_hit_blocks = 0
        """Number of blocks that sequences took from the prefix cache since the engine started."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._device_pool.block_size

    def worst_case_blocks(self, request: EngineRequest) -> int:
        """Number of blocks that a request can use at most: when all its sequences have their maximum length.

        They share the prompt's full blocks. With several sequences, one block more is needed while the shared partial
        block is copied; with beams, which fork in every step, one for each.
        """
        sampling, max_tokens = request.sampling, 0 if request.pooling else request.sampling.max_tokens
        assert max_tokens is not None
        full = len(request.prompt) // self._device_pool.block_size
        own = self._device_pool.blocks_for(len(request.prompt) + max_tokens) - full
        copies = sampling.num_sequences if sampling.use_beam_search else sampling.num_sequences > 1
        return full + sampling.num_sequences * own + copies

    def set_weights(self, version: str) -> None:
        """Use another version of the weights for hashes, and forget what blocks contain."""
        self._weights = version
        self.forget_contents()

    def forget_contents(self) -> None:
        """Forget what blocks contain: empty the prefix cache, and have prefixes that were imported before computed."""
        self.generation += 1
        self._device_pool.clear_cache()

    # --- A sequence starts or grows -----------------------------------------------------------------------------------

    def find_cache_hit(self, sequence: Sequence) -> CacheHit:
        """The longest computed prefix of a waiting sequence, in the prefix cache or swapped out. At least one token is
        left to compute."""
        if sequence.state is State.SWAPPED:
            return CacheHit(sequence.num_computed, [])
        if prefix := self._imported.get(sequence):
            return CacheHit(prefix.num_tokens, prefix.blocks)
        if not self._options.enable_prefix_caching or sequence.needs_all_hidden_states:
            return CacheHit(0, [])
        self._update_block_hashes(sequence)
        size = self._device_pool.block_size
        hashes = sequence.block_hashes[: (len(sequence.tokens) - 1) // size]
        blocks = self._device_pool.find_longest_hit(hashes)
        num_loaded = self.offloading.count(hashes[len(blocks) :]) if self.offloading else 0
        return CacheHit((len(blocks) + num_loaded) * size, blocks, num_loaded)

    def allocate(self, sequence: Sequence, hit: CacheHit, count: int, alone: bool) -> list[OffloadedBlock] | None:
        """Allocate blocks for a waiting sequence to start: those of ``hit``, and for ``count`` tokens after it.

        Args:
            alone: whether no other sequence runs; ``kv_cache_ratio`` is then not enforced.

        Returns:
            Blocks that its first step has to load (``Plan.loads``). None, and changes nothing, if too few are free.
        """
        pool = self._device_pool
        demand = self._block_demand(sequence, hit, count)
        while demand.from_free + demand.reserved > pool.num_free - self._reserved:
            if not self.drop_import(keep=sequence):
                return None
            demand = self._block_demand(sequence, hit, count)  # dropped blocks may be among those of the hit
        if not alone and pool.num_used + demand.from_free > self._options.kv_cache_ratio * pool.total:
            return None
        loaded = range(len(hit.blocks), len(hit.blocks) + hit.num_loaded)
        slots: list[int] = []
        if self.offloading and sequence.state is not State.SWAPPED and sequence not in self._imported:
            slots = self.offloading.hold(sequence.block_hashes[loaded.start : loaded.stop])
            if len(slots) < len(loaded):  # one was evicted meanwhile
                return None
            self.offloading.num_queries += len(sequence.tokens) // pool.block_size - len(hit.blocks)
        pool.incref(hit.blocks)
        if sequence in self._imported:
            self._drop(sequence)
        else:
            self.num_hit_blocks += len(hit.blocks)
        sequence.blocks = hit.blocks + pool.allocate(demand.total - len(hit.blocks))
        sequence.allocated_blocks += demand.total - len(hit.blocks)
        self._reserve(sequence, demand.reserved)
        return [
            OffloadedBlock(sequence.blocks[index], slot, sequence.block_hashes[index])
            for index, slot in zip(loaded, slots, strict=True)
        ]

    def _block_demand(self, sequence: Sequence, hit: CacheHit, count: int) -> BlockDemand:
        """The blocks that a waiting sequence needs for ``hit`` and ``count`` tokens after it."""
        pool = self._device_pool
        total = max(pool.blocks_for(hit.num_computed + count), len(sequence.host_blocks))
        if not sequence.num_output_tokens:
            decode_blocks = self._options.static_decode_blocks
            total = max(total, min(total + decode_blocks, pool.blocks_for(sequence.max_len)))
        from_free = total - len(hit.blocks) + pool.num_free_among(hit.blocks)
        reserved = max(self.worst_case_blocks(sequence.request) - total, 0) if self._never_evict else 0
        return BlockDemand(total, from_free, reserved)

    def num_blocks_to_start(self, sequence: Sequence) -> int:
        """Number of free blocks that a waiting sequence takes or reserves if it starts with all of its tokens."""
        hit = self.find_cache_hit(sequence)
        demand = self._block_demand(sequence, hit, len(sequence.tokens) - hit.num_computed)
        return demand.from_free + demand.reserved

    @property
    def num_blocks_for_starts(self) -> int:
        """Number of free blocks that waiting sequences may take while others run: those that are neither reserved nor
        held back by ``kv_cache_ratio``."""
        pool = self._device_pool
        held_back = pool.total - int(self._options.kv_cache_ratio * pool.total)
        return pool.num_free - max(self._reserved, held_back)

    def num_blocks_to_allocate(self, sequence: Sequence, count: int) -> int:
        """Number of blocks to allocate before ``count`` more tokens of a running sequence can be computed."""
        num_new = self._device_pool.blocks_for(sequence.num_scheduled + count) - len(sequence.blocks)
        return max(num_new, 0) + self._writes_shared(sequence)

    def append_slots(self, sequence: Sequence, num_blocks: int) -> list[tuple[int, int]]:
        """Allocate blocks for the next tokens of a running sequence. Copy on write: if the next token would be
        written to a shared block, one of the new blocks takes its place.

        Args:
            num_blocks: ``num_blocks_to_allocate``.

        Returns (from, to) of the blocks to copy.
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
        """Add the blocks that tokens ``start`` to ``end``, just computed, have filled to the prefix cache.

        Args:
            new_token_ids: tokens after ``sequence.tokens`` that are about to be appended; some may be computed already.
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

    def uncache(self, sequence: Sequence) -> None:
        """Remove all blocks of a sequence from the prefix cache, because their keys and values are wrong."""
        self._device_pool.uncache(sequence.blocks)
        if self.offloading:
            self.offloading.forget(sequence.block_hashes)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, on the device and in the host tier; files of the disk tier stay."""
        self._device_pool.clear_cache()
        if self.offloading:
            self.offloading.clear()

    # --- Keys and values move between tiers of the prefix cache -------------------------------------------------------

    def read_prefix(self, request: EngineRequest) -> Future[None] | None:
        """Read the blocks of a prompt that only the disk has into the host tier. None if there are none."""
        sampling = request.sampling
        if not self.offloading or sampling.prompt_logprobs is not None or sampling.return_context_logits:
            return None
        hashes = self.prompt_hashes(request, len(request.prompt) - 1)
        left = hashes[len(self._device_pool.find_longest_hit(hashes)) :]
        return self.offloading.read(left[self.offloading.count(left) :])

    # --- Keys and values come from or go to another engine ------------------------------------------------------------

    def slot_mapping(self, blocks: list[int], start: int, end: int) -> np.ndarray:
        """Slots of the KV cache of tokens ``start`` to ``end`` of a sequence with these blocks, ``[end - start]``
        int64."""
        positions, size = np.arange(start, end), self._device_pool.block_size
        return np.asarray(blocks, np.int64)[positions // size] * size + positions % size

    def prompt_hashes(self, request: EngineRequest, num_tokens: int) -> list[bytes]:
        """Hashes of the full blocks of the leading ``num_tokens`` of a prompt."""
        hashes: list[bytes] = []
        root = root_hash(self._weights, request.adapter, request.cache_salt)
        extend_block_hashes(hashes, root, request.prompt[:num_tokens], self._device_pool.block_size, request.images)
        return hashes

    def begin_import(self, hashes: list[bytes], num_tokens: int, min_tokens: int) -> tuple[int, list[int]] | None:
        """Allocate blocks for the leading ``num_tokens`` of a prompt, which another engine computes.

        Args:
            hashes: ``prompt_hashes`` of these tokens.

        Returns:
            Number of leading tokens that are in the prefix cache, which are not to be written, and the blocks of all
            the tokens, with a reference each; no blocks if fewer than ``min_tokens`` are to be computed. None if
            too few blocks are free.
        """
        pool = self._device_pool
        hit = pool.find_longest_hit(hashes)
        present = len(hit) * pool.block_size
        if num_tokens - present < max(min_tokens, 1):
            return present, []
        count = pool.blocks_for(num_tokens) - len(hit)
        from_free = count + pool.num_free_among(hit)
        if pool.num_used:
            spare = pool.total // SPARE_BLOCKS
            if pool.num_used + from_free > min(self._options.kv_cache_ratio * pool.total, pool.total - spare):
                return None
        if from_free > pool.num_free - self._reserved:
            return None
        pool.incref(hit)
        return present, hit + pool.allocate(count)

    def finish_import(self, hashes: list[bytes], blocks: list[int], num_tokens: int, num_cached: int) -> ImportedPrefix:
        """Add blocks of ``begin_import``, which have been written, to the prefix cache."""
        for block, block_hash in zip(blocks, hashes, strict=False):
            self._device_pool.cache_block(block, block_hash)
        if self.offloading:
            self.offloading.store(blocks[: len(hashes)], hashes)
        return ImportedPrefix(num_tokens, blocks, num_cached, self.generation)

    def attach_import(self, sequence: Sequence, prefix: ImportedPrefix) -> None:
        """Let a waiting sequence start with an imported prefix, which is released if its contents are forgotten."""
        if prefix.generation != self.generation:
            self.release_import(prefix)
            return
        self._imported[sequence] = prefix
        sequence.num_imported = prefix.num_cached

    def release_import(self, prefix: ImportedPrefix) -> None:
        """Release a prefix that no sequence has."""
        self._device_pool.release(prefix.blocks)

    def release_imported(self, sequence: Sequence) -> None:
        """Release the imported prefix of a waiting sequence, if it has one."""
        if sequence in self._imported:
            self._drop(sequence)

    def drop_import(self, keep: Sequence | None = None) -> bool:
        """Release the imported prefix that came last, but not that of ``keep``: what of it is not needed stays in the
        prefix cache. Returns whether there was one."""
        sequence = next((one for one in reversed(self._imported) if one is not keep), None)
        if sequence:
            self._drop(sequence)
        return sequence is not None

    def _drop(self, sequence: Sequence) -> None:
        self._device_pool.release(self._imported.pop(sequence).blocks)

    # --- A sequence is forked -----------------------------------------------------------------------------------------

    def fork(self, first: Sequence, index: int) -> Sequence:
        """Fork ``first``: a copy of it as sequence ``index`` of its request, which shares its blocks."""
        shared = first.blocks[: self._device_pool.blocks_for(first.num_scheduled)]
        sibling = first.fork(index, shared)
        self._device_pool.incref(shared)
        if self._never_evict:
            num_own = self._device_pool.blocks_for(first.max_len) - first.num_scheduled // self._device_pool.block_size
            self._reserve(first, first.reserved - num_own)
            self._reserve(sibling, num_own)
        return sibling

    def reorder_beams(self, beams: list[Sequence], parents: list[int], token_ids: list[int]) -> None:
        """Let beam ``i`` continue from the state of beam ``parents[i]``, sharing its blocks, and append
        ``token_ids[i]``."""
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
                num_own = (
                    self._device_pool.blocks_for(beam.max_len) - beam.num_scheduled // self._device_pool.block_size
                )
                self._reserve(beam, num_own)

    # --- A sequence stops or is swapped -------------------------------------------------------------------------------

    def unreserve(self, sequence: Sequence) -> None:
        """End the reservation of a sequence."""
        self._reserve(sequence, 0)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks on the device."""
        if self.offloading and sequence.block_hashes:
            self.offloading.touch(sequence.block_hashes[: len(sequence.blocks)])
        self._device_pool.release(sequence.blocks)
        sequence.blocks = []

    def release_host(self, sequence: Sequence) -> None:
        """Free a sequence's blocks in the host tier."""
        if self._host_pool:
            self._host_pool.release(sequence.host_blocks)
        sequence.host_blocks = []

    def swap_out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Allocate blocks in the host tier for all blocks of a sequence. Returns (device, host) of the blocks to copy;
        none if there is no tier, or too few are free."""
        if not self._host_pool or len(sequence.blocks) > self._host_pool.num_free:
            return []
        sequence.host_blocks = self._host_pool.allocate(len(sequence.blocks))
        return list(zip(sequence.blocks, sequence.host_blocks, strict=True))

    def swap_in(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Free a sequence's blocks in the host tier. Returns (host, device) of the blocks that the same step copies."""
        moved = list(zip(sequence.host_blocks, sequence.blocks, strict=False))
        self.release_host(sequence)
        return moved

    def _update_block_hashes(self, sequence: Sequence, new_token_ids: list[int] | None = None) -> None:
        """Hash the full blocks of a sequence's tokens, followed by ``new_token_ids``."""
        request = sequence.request
        start = b"" if sequence.block_hashes else root_hash(self._weights, request.adapter, request.cache_salt)
        tokens = sequence.tokens + new_token_ids if new_token_ids else sequence.tokens
        extend_block_hashes(sequence.block_hashes, start, tokens, self._device_pool.block_size, request.images)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """True if the next token would be written to a block that other sequences reference, too."""
        block, filled = divmod(sequence.num_scheduled, self._device_pool.block_size)
        return bool(filled) and self._device_pool.ref_count(sequence.blocks[block]) > 1

    def _reserve(self, sequence: Sequence, blocks: int) -> None:
        """Set the number of free blocks that are reserved for a sequence."""
        self._reserved += blocks - sequence.reserved
        sequence.reserved = blocks
