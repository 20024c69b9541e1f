"""The pool of KV blocks: reference counts, free blocks, and the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Fixed-size blocks with reference counts. A block without references is free; the least recently used free block
    is allocated first.

    A free block stays in the prefix cache until it is allocated again, so ``num_free`` includes cached blocks.

    Args:
        blocks: number of blocks.
        block_size: tokens per block.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        """Number of blocks."""
        self.block_size = block_size
        self._ref_counts = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        """Ordered set of the free blocks, in the order of allocation."""
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * blocks
        """Hash of each cached block; None for blocks that are not cached."""
        self.num_evictions = 0
        """Number of cached blocks that were allocated again, and so evicted from the prefix cache."""

    @property
    def num_free(self) -> int:
        """Number of blocks without references."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of blocks with references."""
        return self.total - len(self._free)

    def ref_count(self, block: int) -> int:
        """Number of references to a block."""
        return self._ref_counts[block]

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, each with one reference. Raises ``ValueError`` if fewer blocks are free."""
        if count > len(self._free):
            raise ValueError(f"cannot allocate {count} blocks: {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
            self.num_evictions += self._hash_of[block] is not None
            self._evict(block)
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. The blocks may be in use, or free and cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a sequence.

        Freed blocks that are not cached will be allocated before all cached blocks.

        Args:
            blocks: blocks in the order of the tokens. The last block is freed first, so that the end of a cached prefix
                is evicted before its beginning.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} released more often than referenced"
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Add a full, computed block to the prefix cache, unless another block is cached under ``block_hash``."""
        if block_hash not in self._block_by_hash:
            self._evict(block)
            self._block_by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def find_longest_hit(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix: the blocks cached under the leading ``block_hashes``, up to the first
        hash that is not cached. This adds no references; call ``incref`` to keep the blocks."""
        blocks = []
        for block_hash in block_hashes:
            if (block := self._block_by_hash.get(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def cached_block(self, block_hash: bytes) -> int | None:
        """Block that is cached under a hash; None if the hash is not cached."""
        return self._block_by_hash.get(block_hash)

    @property
    def num_cached(self) -> int:
        """Number of blocks in the prefix cache."""
        return len(self._block_by_hash)

    @property
    def states(self) -> str:
        """One digit per block: 0 free, 1 free and cached, 2 one reference, 3 several references."""
        blocks = zip(self._ref_counts, self._hash_of, strict=True)
        return "".join("3" if refs > 1 else "2" if refs else "0" if cached is None else "1" for refs, cached in blocks)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Number of ``blocks`` without references, by which ``incref(blocks)`` would lower ``num_free``."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def clear_cache(self) -> None:
        """Remove all blocks from the prefix cache, for example after a weight update."""
        self._block_by_hash.clear()
        self._hash_of = [None] * self.total

    def uncache(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the prefix cache."""
        for block in blocks:
            self._evict(block)

    def _evict(self, block: int) -> None:
        """Remove a block from the prefix cache; ignored if it is not cached."""
        if (block_hash := self._hash_of[block]) is not None:
            del self._block_by_hash[block_hash]
            self._hash_of[block] = None
