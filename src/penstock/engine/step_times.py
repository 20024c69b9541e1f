"""How long steps take, so that a long one is not taken for a hang."""

from __future__ import annotations

DECAY = 0.95
"""Of the slowest seconds a token, for each step: one outlier is forgotten after some dozens of steps."""
FIRST_STEP = 9
"""Times ``engine_iteration_timeout`` that the first step may take, of which nothing is known yet."""


class StepTimes:
    """Durations of the steps so far.

    Args:
        first: seconds that the first step may take, of which nothing is known yet.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._per_token: float | None = None
        self.longest = 0.0
        """Seconds of the longest step so far."""

    def expected(self, tokens: int) -> float:
        """Seconds that a step of so many tokens may take. A bound rather than a guess: steps of few tokens take more
        time for each of them, as all weights are read whatever the number."""
        return self._first if self._per_token is None else tokens * self._per_token

    def add(self, tokens: int, seconds: float) -> None:
        """A step has taken so long."""
        self.longest = max(self.longest, seconds)
        self._per_token = max(seconds / max(tokens, 1), DECAY * (self._per_token or 0.0))
