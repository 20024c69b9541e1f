"""Who waits: the best comes first, however many there are."""

from __future__ import annotations

from heapq import heappop, heappush

from .sequence import Sequence, State

Turn = tuple[int, int, int]


class Waiting:
    """Sequences to be admitted, by priority (where it counts), then arrival.

    Long prompts stand in a line of their own, so that others may overtake them without a search. What leaves out of
    turn is only marked, and dropped when it comes to the front: every operation takes logarithmic time at most.
    """

    def __init__(self, by_priority: bool, long_threshold: int = 0) -> None:
        self._by_priority = by_priority
        self._long_threshold = long_threshold
        self._short: list[tuple[Turn, Sequence]] = []
        self._long: list[tuple[Turn, Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def turn(self, sequence: Sequence) -> Turn:
        """What sequences are ordered by; no two are equal."""
        priority = sequence.request.priority if self._by_priority else 0
        return priority, sequence.order, sequence.index

    def is_long(self, sequence: Sequence) -> bool:
        return 0 < self._long_threshold < len(sequence.tokens) - sequence.computed

    def push(self, sequence: Sequence, expected: bool = False) -> None:
        heappush(self._long if self.is_long(sequence) else self._short, (self.turn(sequence), sequence))
        self._count += not expected

    def expect(self) -> None:
        """One more waits, which is pushed once it can run."""
        self._count += 1

    def first(self, with_long: bool) -> Sequence | None:
        """The next in turn; without ``with_long`` the next that is not long."""
        for line in (self._short, self._long):
            while line and line[0][1].state not in (State.WAITING, State.SWAPPED):
                heappop(line)
        heads = [line[0] for line in (self._short, self._long if with_long else []) if line]
        return min(heads)[1] if heads else None

    def leave(self) -> None:
        """One has left: whoever calls has changed its state."""
        self._count -= 1
