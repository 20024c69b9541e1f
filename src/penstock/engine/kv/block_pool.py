"""The pool of KV blocks: reference counts, free blocks, and the cached prefixes that blocks hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Fixed-size blocks with reference counts. Those without references are free, the least recently used first.

    A free block stays cached until it is allocated again: ``free`` counts cached blocks, too, and the cache takes no
    blocks from running sequences.

    Args:
        blocks: number of blocks.
        block_size: tokens in a block.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        self.block_size = block_size
        self._ref_counts = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._block_of: dict[bytes, int] = {}
        self._prefix_of: list[bytes | None] = [None] * blocks

    @property
    def free(self) -> int:
        """Number of blocks without references."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks with references."""
        return self.total - len(self._free)

    def ref_count(self, block: int) -> int:
        """Number of references to a block."""
        return self._ref_counts[block]

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks, each with one reference. Raises ``ValueError`` where fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
            self._forget(block)
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, which may be in use, or free and cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a sequence.

        Args:
            blocks: in the order of the tokens. The last ones become free first, so that the end of a cached prefix is
                evicted before its beginning. Blocks that are not cached are allocated before any that are.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} released more often than referenced"
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._prefix_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: int, prefix: bytes) -> None:
        """Cache ``block``, full and computed, under the hash ``prefix``, unless another block already is."""
        if prefix not in self._block_of:
            self._forget(block)
            self._block_of[prefix] = block
            self._prefix_of[block] = prefix

    def cached(self, prefixes: Iterable[bytes]) -> list[int]:
        """The cached blocks of ``prefixes``, up to the first hash that is not cached. No references are added."""
        blocks = []
        for prefix in prefixes:
            if (block := self._block_of.get(prefix)) is None:
                break
            blocks.append(block)
        return blocks

    def free_among(self, blocks: Iterable[int]) -> int:
        """Number of ``blocks`` without references: ``incref`` would lower ``free`` by it."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def clear_cache(self) -> None:
        """Remove all blocks from the cache, as after a change of weights."""
        self._block_of.clear()
        self._prefix_of = [None] * self.total

    def uncache(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the cache."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        if (prefix := self._prefix_of[block]) is not None:
            del self._block_of[prefix]
            self._prefix_of[block] = None
