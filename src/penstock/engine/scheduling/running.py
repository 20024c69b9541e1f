"""The running sequences and the batch slots that they take."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from ..kv.cache_manager import KVCacheManager
from ..sequence.sequence import Sequence, State
from .waiting import Turn


class Running:
    """The running sequences, in scheduling order: steps are planned from the first on, the last is preempted first.

    Each takes one batch slot (``Sequence.row``) until it has stopped running and no step in flight computes it. Slots
    are reserved for the sequences that are still to be forked from a running one.

    Args:
        max_num_seqs: number of batch slots.
        turn: sort key of a sequence (``Waiting.turn``).
    """

    def __init__(self, max_num_seqs: int, kv: KVCacheManager, turn: Callable[[Sequence], Turn]) -> None:
        self._kv = kv
        self._turn = turn
        self._sequences: list[Sequence] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_reserved = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def last(self) -> Sequence:
        """The sequence to be preempted first; there must be one."""
        return self._sequences[-1]

    @property
    def num_free_slots(self) -> int:
        """Batch slots that are neither taken nor reserved."""
        return len(self._free_rows) - self._num_reserved

    def start(self, sequence: Sequence) -> None:
        """Run a sequence whose blocks are allocated. Takes a slot, and reserves one for each that is to be forked from
        it; the caller has checked ``num_free_slots``."""
        sequence.state = State.RUNNING
        sequence.row, sequence.sent_blocks = self._free_rows.pop(), -1
        self._num_reserved += sequence.num_unforked
        bisect.insort(self._sequences, sequence, key=self._turn)

    def start_forks(self, first: Sequence, siblings: list[Sequence]) -> None:
        """Run all sequences that were to be forked from ``first``, in the slots that were reserved for them. They take
        part in the step in which ``first`` does."""
        self._num_reserved -= first.num_unforked
        first.num_unforked = 0
        for sibling in siblings:
            sibling.inflight_steps = 1
            self.start(sibling)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, which keeps its slot and blocks until ``release``."""
        del self._sequences[bisect.bisect_left(self._sequences, self._turn(sequence), key=self._turn)]
        self._num_reserved -= sequence.num_unforked
        self._kv.unreserve(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free slot and blocks of a sequence that was removed, unless a step in flight computes it: then call again
        once the step is collected. A sequence without a slot is ignored."""
        if sequence.inflight_steps == 0 and sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
            self._kv.release(sequence)
