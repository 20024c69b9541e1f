"""KVCacheManager for sequences: the KV blocks that each holds, needs, shares, is promised and gives back."""

from __future__ import annotations

from typing import NamedTuple

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest
from penstock.core.errors import invalid

from ..sequence.sequence import Sequence, State
from . import prefix
from .block_pool import BlockPool


class CacheHit(NamedTuple):
    """Where a waiting sequence goes on: after ``start`` tokens, of which ``hits`` are cached blocks."""

    start: int
    hits: list[int]


class KVCacheManager:
    """Blocks of sequences, on the device and in the host tier.

    Args:
        host: where swapped sequences wait; None where there is no such tier.
        weights: names the weights in the prefix cache.

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
        """Blocks that were found in the prefix cache since the engine started."""

    def worst_case_blocks(self, request: EngineRequest) -> int:
        """Blocks that all sequences of a request hold at their longest; what is full of the prompt is shared.

        One more where there are several, since the first to write into the shared rest copies it; beams part and copy
        again and again.
        """
        sampling, max_tokens = request.sampling, 0 if request.pooling else request.sampling.max_tokens
        assert max_tokens is not None
        full = len(request.prompt) // self._device.block_size
        own = self._device.blocks_for(len(request.prompt) + max_tokens) - full
        copies = sampling.width if sampling.use_beam_search else sampling.width > 1
        return full + sampling.width * own + copies

    # --- A sequence begins, or goes on --------------------------------------------------------------------------------

    def find_cached(self, sequence: Sequence) -> CacheHit:
        """Where a waiting sequence can go on."""
        if sequence.state is State.SWAPPED:
            return CacheHit(sequence.num_computed, [])
        if not self._options.enable_prefix_caching or sequence.wants_all:
            return CacheHit(0, [])
        self._update_block_hashes(sequence)
        size = self._device.block_size
        hits = self._device.cached(
            sequence.block_hashes[: (len(sequence.tokens) - 1) // size]
        )  # one token is left to compute
        return CacheHit(len(hits) * size, hits)

    def take(self, sequence: Sequence, place: CacheHit, count: int, alone: bool) -> bool:
        """Give a waiting sequence blocks for ``count`` tokens from ``place`` on. False: they are not there.

        Args:
            alone: whether no other sequence runs.
        """
        device = self._device
        needed, taken, later = self._needed(sequence, place, count)
        if taken + later > device.free - self._reserved:
            return False
        if not alone and device.used + taken > self._options.kv_cache_ratio * device.total:
            return False
        device.incref(place.hits)
        self.reused += len(place.hits)
        sequence.blocks = place.hits + device.allocate(needed - len(place.hits))
        sequence.allocated_blocks += needed - len(place.hits)
        self._reserve(sequence, later)
        return True

    def _needed(self, sequence: Sequence, place: CacheHit, count: int) -> tuple[int, int, int]:
        """Blocks for ``count`` tokens from ``place`` on: all, those taken from the free ones, and those set aside for
        later."""
        device = self._device
        needed = max(device.blocks_for(place.start + count), len(sequence.host_blocks))
        if not sequence.generated:
            decoding = self._options.static_decode_blocks
            needed = max(needed, min(needed + decoding, device.blocks_for(sequence.max_len)))
        taken = needed - len(place.hits) + device.free_among(place.hits)
        later = max(self.worst_case_blocks(sequence.request) - needed, 0) if self._never_evicting else 0
        return needed, taken, later

    def blocks_to_start(self, sequence: Sequence) -> int:
        """Free blocks that a waiting sequence takes when it starts, with all of its tokens."""
        place = self.find_cached(sequence)
        _, taken, later = self._needed(sequence, place, len(sequence.tokens) - place.start)
        return taken + later

    @property
    def spare(self) -> int:
        """Free blocks for sequences that start beside others."""
        device = self._device
        held_back = device.total - int(self._options.kv_cache_ratio * device.total)
        return device.free - max(self._reserved, held_back)

    def missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to allocate before ``count`` more tokens can be computed."""
        missing = self._device.blocks_for(sequence.num_scheduled + count) - len(sequence.blocks)
        return max(missing, 0) + self._writes_shared(sequence)

    def grow(self, sequence: Sequence, missing: int) -> list[tuple[int, int]]:
        """Allocate the blocks that are missing; a shared one that is written next is replaced by a copy.

        Returns blocks to copy: from, to.
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

    def keep(self, sequence: Sequence, start: int, end: int, drawn: list[int]) -> None:
        """Let the blocks that became full with tokens ``start`` to ``end`` be found by others.

        Args:
            drawn: tokens that it is about to get, which may be among them.
        """
        size = self._device.block_size
        if self._options.enable_prefix_caching and start // size < end // size:
            self._update_block_hashes(sequence, drawn)
            for full in range(start // size, end // size):
                self._device.cache(sequence.blocks[full], sequence.block_hashes[full])

    def uncache(self, sequence: Sequence) -> None:
        """Let none of its blocks be found by others any more: what is in them is wrong."""
        self._device.uncache(sequence.blocks)

    # --- Several go on from one ---------------------------------------------------------------------------------------

    def fork(self, first: Sequence, index: int) -> Sequence:
        """A sibling that goes on from here, over the same blocks."""
        shared = first.blocks[: self._device.blocks_for(first.num_scheduled)]
        twin = first.fork(index, shared)
        self._device.incref(shared)
        if self._never_evicting:
            own = self._device.blocks_for(first.max_len) - first.num_scheduled // self._device.block_size
            self._reserve(first, first.reserved - own)
            self._reserve(twin, own)
        return twin

    def branch(self, group: list[Sequence], parents: list[int], token_ids: list[int]) -> None:
        """Let each beam become one of them as it was, over the same blocks, and a token more.

        Args:
            parents: by beam, which of them it becomes.
            token_ids: by beam, the token that it has more.
        """
        old = [(one.tokens, one.blocks, one.block_hashes) for one in group]
        for one, parent, token in zip(group, parents, token_ids, strict=True):
            tokens, blocks, block_hashes = old[parent]
            shared = blocks[: self._device.blocks_for(one.num_scheduled)]
            self._device.incref(shared)
            one.tokens, one.blocks, one.block_hashes = [*tokens, token], shared, block_hashes.copy()
            one.sent_blocks = len(shared)
        for one, (_, blocks, _) in zip(group, old, strict=True):
            self._device.release(blocks)
            if self._never_evicting:
                self._reserve(one, self._device.blocks_for(one.max_len) - one.num_scheduled // self._device.block_size)

    # --- A sequence gives back ----------------------------------------------------------------------------------------

    def unreserve(self, sequence: Sequence) -> None:
        """Nothing is set aside for it any more."""
        self._reserve(sequence, 0)

    def release(self, sequence: Sequence) -> None:
        """Give back its blocks on the device."""
        self._device.release(sequence.blocks)
        sequence.blocks = []

    def release_host(self, sequence: Sequence) -> None:
        """Give back its blocks in the host tier."""
        if self._host:
            self._host.release(sequence.host_blocks)
        sequence.host_blocks = []

    def swap_out(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Take blocks in the host tier for all of its own. Returns which to copy: device, host; none where there is no
        such tier, or no room in it."""
        if not self._host or len(sequence.blocks) > self._host.free:
            return []
        sequence.host_blocks = self._host.allocate(len(sequence.blocks))
        return list(zip(sequence.blocks, sequence.host_blocks, strict=True))

    def swap_in(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Give back its blocks in the host tier. Returns which to copy before: host, device."""
        moved = list(zip(sequence.host_blocks, sequence.blocks, strict=False))
        self.release_host(sequence)
        return moved

    def _update_block_hashes(self, sequence: Sequence, drawn: list[int] | None = None) -> None:
        """Name the full blocks of its tokens for the prefix cache, and of those that it is about to get."""
        request = sequence.request
        start = b"" if sequence.block_hashes else prefix.root(self._weights, request.adapter, request.cache_salt)
        tokens = sequence.tokens + drawn if drawn else sequence.tokens
        prefix.extend(sequence.block_hashes, start, tokens, self._device.block_size)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that others hold, too."""
        block, filled = divmod(sequence.num_scheduled, self._device.block_size)
        return bool(filled) and self._device.ref_count(sequence.blocks[block]) > 1

    def _reserve(self, sequence: Sequence, blocks: int) -> None:
        """Set aside so many blocks for a sequence, in place of what was."""
        self._reserved += blocks - sequence.reserved
        sequence.reserved = blocks


class StartableCount:
    """Counts how many of those who wait can start at once, one after the other until one does not fit.

    Args:
        slots: free batch slots.
        alone: whether no sequence runs; then the first one starts, however large it is.
    """

    def __init__(self, room: KVCacheManager, slots: int, alone: bool) -> None:
        self._kv = room
        self._slots = slots
        self._blocks = room.spare
        self._alone = alone
        self._full = False
        self.count = 0

    def fits(self, sequence: Sequence, siblings: int) -> bool:
        """Whether one more starts, with so many that are to be forked from it."""
        if self._full or 1 + siblings > self._slots:
            return False
        return (self._alone and not self.count) or self._kv.blocks_to_start(sequence) <= self._blocks

    def add(self, sequence: Sequence, siblings: int) -> None:
        """The next one in the queue."""
        self._full = not self.fits(sequence, siblings)
        if not self._full:
            self.count += 1
            self._slots -= 1 + siblings
            self._blocks -= self._kv.blocks_to_start(sequence)
