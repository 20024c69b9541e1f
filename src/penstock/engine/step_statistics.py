"""Tokens and durations of steps: counts for a histogram, and bounds that tell a long step from one that hangs."""

from __future__ import annotations

from bisect import bisect_left

BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds, tokens; a last bucket has all larger steps."""
DECAY = 0.95
"""Factor of the slowest time per token after each step, so that an outlier is forgotten after some dozens of steps."""
FIRST_STEP_TIMEOUT_FACTOR = 9
"""Multiple of ``engine_iteration_timeout`` that the first step may take, since no step was measured before."""


class StepCounts:
    """Counts of steps by their tokens, drafts included, since the engine's start."""

    def __init__(self) -> None:
        self.steps = [0] * (len(BUCKETS) + 1)
        """Of each bucket."""
        self.tokens = 0
        """Of all steps together."""

    def record(self, tokens: int) -> None:
        self.steps[bisect_left(BUCKETS, tokens)] += 1
        self.tokens += tokens


class StepTimes:
    """Durations of the steps so far, and bounds for the next.

    Args:
        first: seconds that the first step may take.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._per_token: float | None = None
        self.longest = 0.0
        """Seconds of the longest step so far."""

    def expected(self, tokens: int) -> float:
        """Maximum seconds that a step of ``tokens`` tokens should take: ``tokens`` times the slowest time per token so
        far. That is the time of a step of few tokens, as it reads all weights, too."""
        return self._first if self._per_token is None else tokens * self._per_token

    def add(self, tokens: int, seconds: float) -> None:
        """Record a step of ``tokens`` tokens that took ``seconds``."""
        self.longest = max(self.longest, seconds)
        self._per_token = max(seconds / max(tokens, 1), DECAY * (self._per_token or 0.0))
