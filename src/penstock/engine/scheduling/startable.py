"""How many waiting sequences could start at once: these do not count against ``max_waiting``."""

from __future__ import annotations

from ..kv.cache_manager import KVCacheManager
from ..sequence.sequence import Sequence


class StartableCount:
    """Counts how many waiting sequences can start at once, in their order, until one does not fit.

    Args:
        slots: free batch slots.
        alone: whether no sequence runs; then the first one starts, however large it is.
    """

    def __init__(self, kv: KVCacheManager, slots: int, alone: bool) -> None:
        self.count = 0
        self._kv = kv
        self._slots = slots
        self._blocks = kv.spare
        self._alone = alone
        self._full = False

    def fits(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` could start, too, with all that are to be forked from it."""
        if self._full or 1 + sequence.num_unforked > self._slots:
            return False
        return (self._alone and not self.count) or self._kv.blocks_to_start(sequence) <= self._blocks

    def add(self, sequence: Sequence) -> None:
        """Count the next sequence of the queue, if it fits; none after the first that does not."""
        self._full = not self.fits(sequence)
        if not self._full:
            self.count += 1
            self._slots -= 1 + sequence.num_unforked
            self._blocks -= self._kv.blocks_to_start(sequence)
