"""Estimates which prefixes each replica has cached, from the requests sent to it."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from penstock.core import EngineRequest

from .messages import Ready


class PrefixIndex:
    """Maps block hashes (over the block's tokens and all tokens before it) to the replicas that have the block cached.
    Its capacity is the number of blocks of all replicas together. Evicts the least recently used blocks."""

    def __init__(self) -> None:
        self._block_size = 1
        self._capacity = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """Block hash → bit mask of the replicas that have the block."""

    def set_capacity(self, engines: Sequence[Ready | None]) -> None:
        """Set the block size to the largest of the engines, and the capacity to their blocks of this size together."""
        known = [engine for engine in engines if engine]
        if not known:
            return
        if (largest := max(engine.block_size for engine in known)) != self._block_size:
            self._blocks.clear()
            self._block_size = largest
        tokens = sum(engine.num_blocks * engine.block_size for engine in known if engine.prefix_caching)
        self._capacity = tokens // largest

    def cached_tokens(self, request: EngineRequest, replicas: int) -> list[int]:
        """Estimated number of leading prompt tokens that each replica has cached.

        Args:
            replicas: number of replicas.
        """
        counts, left = [0] * replicas, -1
        reusable = request.prompt[:-1]  # engines always compute the last token of a prompt
        for number, block in enumerate(self._hashes(request, reusable), 1):
            left &= self._blocks.get(block, 0)
            if not left:
                break
            for replica in range(replicas):
                if left >> replica & 1:
                    counts[replica] = number * self._block_size
        return counts

    def insert(self, request: EngineRequest, output: list[int], replica: int) -> None:
        """Record that a replica has cached the blocks of a request's prompt and ``output`` tokens."""
        for block in self._hashes(request, [*request.prompt, *output]):
            self._blocks[block] = self._blocks.pop(block, 0) | 1 << replica
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def remove_replica(self, replica: int) -> None:
        """Remove all blocks of a replica."""
        for block, replicas in list(self._blocks.items()):
            if left := replicas & ~(1 << replica):
                self._blocks[block] = left
            else:
                del self._blocks[block]

    def clear(self) -> None:
        """Remove all blocks of all replicas."""
        self._blocks.clear()

    def _hashes(self, request: EngineRequest, tokens: Sequence[int]) -> Iterator[int]:
        size = self._block_size * array("i").itemsize
        try:
            data = array("i", tokens).tobytes()
        except OverflowError:  # the engine will reject these invalid token ids
            return
        images = tuple((image.offset, image.content_hash) for image in request.images)
        before = hash((request.adapter, request.cache_salt))
        for start in range(0, len(data) - size + 1, size):
            shown = [image for image in images if image[0] * array("i").itemsize < start + size]
            before = hash((before, data[start : start + size], *shown))
            yield before
