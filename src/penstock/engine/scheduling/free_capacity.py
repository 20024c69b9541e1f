"""Free capacity: how many waiting sequences could start at once. These do not count against ``max_waiting``."""

from __future__ import annotations

from ..kv.cache_manager import KVCacheManager
from ..sequence.sequence import Sequence


class FreeCapacity:
    """The free rows and KV blocks, which are given to the waiting sequences in their order until one does not fit.

    Args:
        num_rows: number of free rows of the batch.
        alone: whether no sequence runs; then the first one fits, however large it is.
    """

    def __init__(self, kv: KVCacheManager, num_rows: int, alone: bool) -> None:
        self.num_startable = 0
        """Number of sequences that fit."""
        self._kv = kv
        self._num_rows = num_rows
        self._num_blocks = kv.num_blocks_for_starts
        self._alone = alone
        self._full = False

    def fits(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` could start beside those given capacity (``take``), with all that are to be forked from
        it."""
        if self._full or 1 + sequence.num_unforked > self._num_rows:
            return False
        return (self._alone and not self.num_startable) or self._kv.num_blocks_to_start(sequence) <= self._num_blocks

    def take(self, sequence: Sequence) -> None:
        """Give capacity to the next sequence of the queue. After the first that does not fit, none does."""
        self._full = not self.fits(sequence)
        if not self._full:
            self.num_startable += 1
            self._num_rows -= 1 + sequence.num_unforked
            self._num_blocks -= self._kv.num_blocks_to_start(sequence)
