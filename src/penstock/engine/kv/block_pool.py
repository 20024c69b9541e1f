"""KV blocks: who holds them, which are free, and which still hold a prefix worth finding again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Fixed-size blocks with reference counts; what nobody holds is free, oldest first.

    A free block keeps what it was cached for until it is handed out again, so ``free`` counts cached blocks too:
    the cache takes no room from running sequences.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        self.block_size = block_size
        self._holders = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._block_of: dict[bytes, int] = {}
        self._prefix_of: list[bytes | None] = [None] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def ref_count(self, block: int) -> int:
        return self._holders[block]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks, each with one holder; whoever asks has looked at ``free`` before."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            self._forget(block)
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """Become one more holder of each, be it in use or free and cached."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Stop holding blocks that were held in this order.

        The last ones become free first: of a cached prefix the end is the first to go. Blocks without a cached
        prefix are handed out before any that has one.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} released more often than held"
            if self._holders[block] == 0:
                self._free[block] = None
                if self._prefix_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: int, prefix: bytes) -> None:
        """Let ``block``, full and computed, be found by ``prefix``. The first block of a prefix stays the one."""
        if prefix not in self._block_of:
            self._forget(block)
            self._block_of[prefix] = block
            self._prefix_of[block] = prefix

    def cached(self, prefixes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of ``prefixes``, from the first on, that is here. They are not held yet."""
        found = []
        for prefix in prefixes:
            if (block := self._block_of.get(prefix)) is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds, which holding them would take from ``free``."""
        return sum(self._holders[block] == 0 for block in blocks)

    def clear_cache(self) -> None:
        """Forget every prefix, as new weights demand."""
        self._block_of.clear()
        self._prefix_of = [None] * self.total

    def uncache(self, blocks: Iterable[int]) -> None:
        """Forget the prefixes of some."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        if (prefix := self._prefix_of[block]) is not None:
            del self._block_of[prefix]
            self._prefix_of[block] = None
