"""The waiting queue: new and preempted sequences, in scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from ..sequence.sequence import Sequence

ScheduleKey = tuple[int, int, int]
"""Sort key of a sequence: priority, order of arrival, index in its request."""


class WaitingQueue:
    """Waiting sequences, sorted by ``schedule_key``.

    Long sequences are in a separate list, so that ``peek`` can skip them without a search. ``push`` and ``remove`` do a
    binary search, and move the tail of a list.

    Args:
        by_priority: sort by priority before arrival (``scheduling_policy``).
        long_threshold: a sequence with more uncomputed tokens than this is long; 0: no sequence is long.
    """

    def __init__(self, by_priority: bool, long_threshold: int = 0) -> None:
        self._by_priority = by_priority
        self._long_threshold = long_threshold
        self._short: list[Sequence] = []
        self._long: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the short sequences in order, then the long ones."""
        return chain(self._short, self._long)

    def schedule_key(self, sequence: Sequence) -> ScheduleKey:
        """Sort key of a sequence; the lowest is scheduled first. Keys are unique."""
        priority = sequence.request.priority if self._by_priority else 0
        return priority, sequence.arrival_order, sequence.index

    def is_long(self, sequence: Sequence) -> bool:
        """True if the sequence has more than ``long_threshold`` uncomputed tokens."""
        return 0 < self._long_threshold < len(sequence.tokens) - sequence.num_computed

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        insort(self._list_of(sequence), sequence, key=self.schedule_key)

    def peek(self, include_long: bool, started: bool = False, request_id: str | None = None) -> Sequence | None:
        """The first sequence in scheduling order; None if the queue is empty.

        Args:
            include_long: also consider long sequences.
            started: consider only preempted sequences.
            request_id: consider only the sequences of this request; None: all.
        """
        queues: tuple[list[Sequence], ...] = (self._short, self._long) if include_long else (self._short,)
        if started:
            queues = tuple([one for one in queue if one.has_started] for queue in queues)
        if request_id is not None:
            queues = tuple([one for one in queue if one.request.request_id == request_id] for queue in queues)
        heads = [queue[0] for queue in queues if queue]
        return min(heads, key=self.schedule_key) if heads else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the queue, with ``num_computed`` unchanged since ``push``."""
        queue = self._list_of(sequence)
        at = bisect_left(queue, self.schedule_key(sequence), key=self.schedule_key)
        assert queue[at] is sequence
        del queue[at]

    def _list_of(self, sequence: Sequence) -> list[Sequence]:
        """The list that holds a sequence."""
        return self._long if self.is_long(sequence) else self._short
