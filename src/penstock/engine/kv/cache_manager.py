"""The KV cache manager: allocates, shares, reserves and frees the KV blocks of sequences."""

from __future__ import annotations

from typing import NamedTuple

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest
from penstock.core.errors import invalid

from ..sequence.sequence import Sequence, State
from . import prefix
from .block_pool import BlockPool


class CacheHit(NamedTuple):
    """What a waiting sequence does not need to compute."""

    start: int
    """Number of leading tokens whose keys and values exist."""
    blocks: list[int]
    """Blocks of the prefix cache that hold them; empty for a sequence that is swapped in."""


class KVCacheManager:
    """Blocks of sequences, on the device and in the host tier.

    Args:
        host: blocks of the host tier, to which sequences are swapped; None where there is none.
        weights: version of the weights, part of the prefix cache's hashes.

    Raises ``PenstockError`` (``invalid``) where the device cannot hold a single sequence of ``max_model_len``.
    """

    def __init__(self, options: SchedulerOptions, device: BlockPool, host: BlockPool | None, weights: str) -> None:
        if device.blocks_for(options.max_model_len) > device.total:
            raise invalid(
                "max_model_len",
                f"{options.max_model_len} tokens do not fit into {device.total} KV blocks of {device.block_size}. "
                "Give the cache more memory, or lower max_model_len.",
                device.total * device.block_size,
            )
        self._options = options
        self._device = device
        self._host = host
        self._weights = weights
        self._never_evicting = options.batch_scheduler_policy == "guaranteed_no_evict"
        self._reserved = 0
        self.reused = 0
        """Number of blocks found in the prefix cache since the engine started."""

    def worst_case_blocks(self, request: EngineRequest) -> int:
        """Number of blocks that a request can use at most: when all its sequences have their maximum length.

        They share the prompt's full blocks. With several sequences, one block more is needed while the shared partial
        block is copied; with beams, which fork in every step, one for each.
        """
        sampling, max_tokens = request.sampling, 0 if request.pooling else request.sampling.max_tokens
        assert max_tokens is not None
        full = len(request.prompt) // self._device.block_size
        own = self._device.blocks_for(len(request.prompt) + max_tokens) - full
        copies = sampling.num_sequences if sampling.use_beam_search else sampling.num_sequences > 1
        return full + sampling.num_sequences * own + copies

    # --- A sequence starts or grows -----------------------------------------------------------------------------------

    def find_cached(self, sequence: Sequence) -> CacheHit:
        """Look up what of a waiting sequence is cached or swapped. At least one token is left to compute."""
        if sequence.state is State.SWAPPED:
            return CacheHit(sequence.num_computed, [])
        if not self._options.enable_prefix_caching or sequence.needs_all_states:
            return CacheHit(0, [])
        self._update_block_hashes(sequence)
        size = self._device.block_size
        blocks = self._device.cached(sequence.block_hashes[: (len(sequence.tokens) - 1) // size])
        return CacheHit(len(blocks) * size, blocks)

    def allocate(self, sequence: Sequence, hit: CacheHit, count: int, alone: bool) -> bool:
        """Allocate a waiting sequence's blocks: those of ``hit``, and for ``count`` tokens after it. False: too few are
        free, and nothing changes.

        Args:
            alone: whether no other sequence runs; then ``kv_cache_ratio`` does not matter.
        """
        device = self._device
        needed, taken, later = self._needed(sequence, hit, count)
        if taken + later > device.free - self._reserved:
            return False
        if not alone and device.used + taken > self._options.kv_cache_ratio * device.total:
            return False
        device.incref(hit.blocks)
        self.reused += len(hit.blocks)
        sequence.blocks = hit.blocks + device.allocate(needed - len(hit.blocks))
        sequence.allocated_blocks += needed - len(hit.blocks)
        self._reserve(sequence, later)
        return True

    def _needed(self, sequence: Sequence, hit: CacheHit, count: int) -> tuple[int, int, int]:
        """Numbers of blocks for ``hit`` and ``count`` tokens after it: in all, taken from the free ones, and to reserve
        beyond them."""
        device = self._device
        needed = max(device.blocks_for(hit.start + count), len(sequence.host_blocks))
        if not sequence.generated:
            decoding = self._options.static_decode_blocks
            needed = max(needed, min(needed + decoding, device.blocks_for(sequence.max_len)))
        taken = needed - len(hit.blocks) + device.free_among(hit.blocks)
        later = max(self.worst_case_blocks(sequence.request) - needed, 0) if self._never_evicting else 0
        return needed, taken, later

    def blocks_to_start(self, sequence: Sequence) -> int:
        """Number of free blocks that a waiting sequence takes or reserves if it starts with all of its tokens."""
        hit = self.find_cached(sequence)
        _, taken, later = self._needed(sequence, hit, len(sequence.tokens) - hit.start)
        return taken + later

    @property
    def spare(self) -> int:
        """Number of free blocks for sequences that start beside others: less those reserved, or held back by
        ``kv_cache_ratio``."""
        device = self._device
        held_back = device.total - int(self._options.kv_cache_ratio * device.total)
        return device.free - max(self._reserved, held_back)

    def missing(self, sequence: Sequence, count: int) -> int:
        """Number of blocks to allocate before ``count`` more tokens of a running sequence can be computed."""
        missing = self._device.blocks_for(sequence.num_scheduled + count) - len(sequence.blocks)
        return max(missing, 0) + self._writes_shared(sequence)

    def grow(self, sequence: Sequence, missing: int) -> list[tuple[int, int]]:
        """Allocate ``missing`` blocks (``missing()``) for a running sequence. A shared block that is written next is
        replaced by one of them.

        Returns (from, to) of the blocks to copy.
        """
        if sequence.reserved:
            self._reserve(sequence, sequence.reserved - min(missing, sequence.reserved))
        shared = self._writes_shared(sequence)
        blocks = self._device.allocate(missing)
        sequence.allocated_blocks += missing
        copies = []
        if shared:
            written = sequence.num_scheduled // self._device.block_size
            copies.append((sequence.blocks[written], blocks[0]))
            self._device.release([sequence.blocks[written]])
            sequence.blocks[written] = blocks.pop(0)
            sequence.sent_blocks = min(sequence.sent_blocks, written)
        sequence.blocks += blocks
        return copies

    def cache(self, sequence: Sequence, start: int, end: int, drawn: list[int]) -> None:
        """Add the blocks that tokens ``start`` to ``end``, just computed, have filled to the prefix cache.

        Args:
            drawn: tokens behind ``sequence.tokens`` that are about to be appended; some may be computed already.
        """
        size = self._device.block_size
        if self._options.enable_prefix_caching and start // size < end // size:
            self._update_block_hashes(sequence, drawn)
            for full in range(start // size, end // size):
                self._device.cache(sequence.blocks[full], sequence.block_hashes[full])

    def uncache(self, sequence: Sequence) -> None:
        """Remove all blocks of a sequence from the prefix cache, because their keys and values are wrong."""
        self._device.uncache(sequence.blocks)

    # --- A sequence is forked -----------------------------------------------------------------------------------------

    def fork(self, first: Sequence, index: int) -> Sequence:
        """A sibling of ``first`` as sequence ``index``, over the same blocks."""
        shared = first.blocks[: self._device.blocks_for(first.num_scheduled)]
        sibling = first.fork(index, shared)
        self._device.incref(shared)
        if self._never_evicting:
            own = self._device.blocks_for(first.max_len) - first.num_scheduled // self._device.block_size
            self._reserve(first, first.reserved - own)
            self._reserve(sibling, own)
        return sibling

    def branch(self, beams: list[Sequence], parents: list[int], token_ids: list[int]) -> None:
        """Replace beam ``i`` by what beam ``parents[i]`` was, over the same blocks, and append ``token_ids[i]``."""
        old = [(beam.tokens, beam.blocks, beam.block_hashes) for beam in beams]
        for beam, parent, token in zip(beams, parents, token_ids, strict=True):
            tokens, blocks, block_hashes = old[parent]
            shared = blocks[: self._device.blocks_for(beam.num_scheduled)]
            self._device.incref(shared)
            beam.tokens, beam.blocks, beam.block_hashes = [*tokens, token], shared, block_hashes.copy()
            beam.sent_blocks = len(shared)
        for beam, (_, blocks, _) in zip(beams, old, strict=True):
            self._device.release(blocks)
            if self._never_evicting:
                own = self._device.blocks_for(beam.max_len) - beam.num_scheduled // self._device.block_size
                self._reserve(beam, own)

    # --- A sequence stops or is swapped -------------------------------------------------------------------------------

    def unreserve(self, sequence: Sequence) -> None:
        """Reserve nothing for a sequence any more."""
        self._reserve(sequence, 0)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks on the device."""
        self._device.release(sequence.blocks)
        sequence.blocks = []

    def release_host(self, sequence: Sequence) -> None:
        """Free a sequence's blocks in the host tier."""
        if self._host:
            self._host.release(sequence.host_blocks)
        sequence.host_blocks = []

    def swap_out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Allocate blocks in the host tier for all blocks of a sequence. Returns (device, host) of the blocks to copy;
        none where there is no tier, or too few are free."""
        if not self._host or len(sequence.blocks) > self._host.free:
            return []
        sequence.host_blocks = self._host.allocate(len(sequence.blocks))
        return list(zip(sequence.blocks, sequence.host_blocks, strict=True))

    def swap_in(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Free a sequence's blocks in the host tier. Returns (host, device) of the blocks that the same step copies."""
        moved = list(zip(sequence.host_blocks, sequence.blocks, strict=False))
        self.release_host(sequence)
        return moved

    def _update_block_hashes(self, sequence: Sequence, drawn: list[int] | None = None) -> None:
        """Hash the full blocks of a sequence's tokens, and of ``drawn`` behind them."""
        request = sequence.request
        start = b"" if sequence.block_hashes else prefix.root(self._weights, request.adapter, request.cache_salt)
        tokens = sequence.tokens + drawn if drawn else sequence.tokens
        prefix.extend(sequence.block_hashes, start, tokens, self._device.block_size)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Whether the next token is written to a block that other sequences reference, too."""
        block, filled = divmod(sequence.num_scheduled, self._device.block_size)
        return bool(filled) and self._device.ref_count(sequence.blocks[block]) > 1

    def _reserve(self, sequence: Sequence, blocks: int) -> None:
        """Reserve ``blocks`` free blocks for a sequence, instead of those reserved before."""
        self._reserved += blocks - sequence.reserved
        sequence.reserved = blocks
