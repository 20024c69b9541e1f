"""The queue: sequences that wait to be admitted, the best first, however many there are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from ..sequence.sequence import Sequence

Turn = tuple[int, int, int]


class Waiting:
    """Sequences to be admitted, by priority (where it counts), then arrival.

    Two sorted lists: long prompts stand in a line of their own, so that others may overtake them without a search. What
    leaves out of turn is taken out at once, which costs a binary search and moving the pointers behind it.
    """

    def __init__(self, by_priority: bool, long_threshold: int = 0) -> None:
        self._by_priority = by_priority
        self._long_threshold = long_threshold
        self._short: list[Sequence] = []
        self._long: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that are not long in turn, then those that are."""
        return chain(self._short, self._long)

    def turn(self, sequence: Sequence) -> Turn:
        """What sequences are ordered by; no two are equal."""
        priority = sequence.request.priority if self._by_priority else 0
        return priority, sequence.order, sequence.index

    def is_long(self, sequence: Sequence) -> bool:
        return 0 < self._long_threshold < len(sequence.tokens) - sequence.num_computed

    def push(self, sequence: Sequence) -> None:
        insort(self._line(sequence), sequence, key=self.turn)

    def first(self, with_long: bool) -> Sequence | None:
        """The next in turn; without ``with_long`` the next that is not long."""
        heads = [line[0] for line in (self._short, self._long if with_long else []) if line]
        return min(heads, key=self.turn) if heads else None

    def leave(self, sequence: Sequence) -> None:
        """Take out one that is in the queue. How much of it is computed must be as it was when it was pushed."""
        line = self._line(sequence)
        at = bisect_left(line, self.turn(sequence), key=self.turn)
        assert line[at] is sequence
        del line[at]

    def _line(self, sequence: Sequence) -> list[Sequence]:
        return self._long if self.is_long(sequence) else self._short
