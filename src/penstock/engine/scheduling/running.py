"""The running batch: the running sequences, and their rows in the workers' batch."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from ..kv.cache_manager import KVCacheManager
from ..sequence.sequence import Sequence, State
from .waiting import ScheduleKey


class RunningBatch:
    """The running sequences, in scheduling order: steps are planned from the first on, the last is preempted first.

    Each has one row of the workers' batch (``Sequence.row``) until it has stopped running and no step in flight
    computes it. Rows are reserved for the sequences that are still to be forked from a running one.

    Args:
        max_num_seqs: number of rows.
        schedule_key: sort key of a sequence (``WaitingQueue.schedule_key``).
    """

    def __init__(self, max_num_seqs: int, kv: KVCacheManager, schedule_key: Callable[[Sequence], ScheduleKey]) -> None:
        self._kv = kv
        self._schedule_key = schedule_key
        self._sequences: list[Sequence] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_reserved_rows = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def last(self) -> Sequence:
        """The sequence to preempt first. Raises ``IndexError`` if none is running."""
        return self._sequences[-1]

    @property
    def num_free_rows(self) -> int:
        """Number of rows that are neither taken nor reserved."""
        return len(self._free_rows) - self._num_reserved_rows

    def start(self, sequence: Sequence) -> None:
        """Run a sequence whose blocks are allocated. Takes a row, and reserves one for each sequence that is to be
        forked from it; the caller has checked ``num_free_rows``."""
        sequence.state = State.RUNNING
        sequence.row, sequence.sent_blocks = self._free_rows.pop(), -1
        self._num_reserved_rows += sequence.num_unforked
        bisect.insort(self._sequences, sequence, key=self._schedule_key)

    def start_forks(self, first: Sequence, siblings: list[Sequence]) -> None:
        """Run all sequences forked from ``first``, in the rows that were reserved for them, and count them as part of
        the step in flight of ``first``."""
        self._num_reserved_rows -= first.num_unforked
        first.num_unforked = 0
        for sibling in siblings:
            sibling.inflight_steps = 1
            self.start(sibling)

    def remove(self, sequence: Sequence) -> None:
        """Stop running a sequence, which keeps its row and blocks until ``free``."""
        del self._sequences[bisect.bisect_left(self._sequences, self._schedule_key(sequence), key=self._schedule_key)]
        self._num_reserved_rows -= sequence.num_unforked
        self._kv.unreserve(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free row and blocks of a removed sequence. Does nothing while a step in flight computes it: call it again
        once that step is collected. A sequence without a row is ignored."""
        if sequence.inflight_steps == 0 and sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
            self._kv.release(sequence)
