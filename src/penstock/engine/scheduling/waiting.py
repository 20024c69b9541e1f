"""The waiting queue: sequences that are new or were preempted, in scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from ..sequence.sequence import Sequence

Turn = tuple[int, int, int]
"""Sort key of a sequence: priority, order of arrival, index in its request."""


class Waiting:
    """Waiting sequences, sorted by ``turn``.

    Those with many tokens to compute are in a list of their own, so that ``first`` can skip them without a search.
    Adding or removing a sequence takes a binary search, and moves the pointers behind it.

    Args:
        by_priority: whether priorities count (``scheduling_policy``); otherwise arrival decides.
        long_threshold: a sequence is long with more tokens than this left to compute; 0: none is.
    """

    def __init__(self, by_priority: bool, long_threshold: int = 0) -> None:
        self._by_priority = by_priority
        self._long_threshold = long_threshold
        self._short: list[Sequence] = []
        self._long: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Sequence]:
        """The short ones in order, then the long ones."""
        return chain(self._short, self._long)

    def turn(self, sequence: Sequence) -> Turn:
        """The sort key of a sequence, lowest first; no two are equal."""
        priority = sequence.request.priority if self._by_priority else 0
        return priority, sequence.order, sequence.index

    def is_long(self, sequence: Sequence) -> bool:
        """Whether the sequence has more than ``long_threshold`` tokens left to compute."""
        return 0 < self._long_threshold < len(sequence.tokens) - sequence.num_computed

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        insort(self._list_of(sequence), sequence, key=self.turn)

    def first(self, with_long: bool) -> Sequence | None:
        """The first sequence in order; without ``with_long`` the first short one. None where there is none."""
        heads = [queue[0] for queue in (self._short, self._long if with_long else []) if queue]
        return min(heads, key=self.turn) if heads else None

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the queue, with ``num_computed`` unchanged since ``push``."""
        queue = self._list_of(sequence)
        at = bisect_left(queue, self.turn(sequence), key=self.turn)
        assert queue[at] is sequence
        del queue[at]

    def _list_of(self, sequence: Sequence) -> list[Sequence]:
        return self._long if self.is_long(sequence) else self._short
