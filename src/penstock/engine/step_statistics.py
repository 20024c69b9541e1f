"""Tokens and durations of steps: a histogram, and time limits that distinguish a long step from a hanging one."""

from __future__ import annotations

from bisect import bisect_left

BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram's buckets, tokens; one more bucket holds all larger steps."""
DECAY = 0.95
"""Factor applied to the slowest time per token after each step, so that an outlier fades after some dozens of steps."""
FIRST_STEP_TIMEOUT_FACTOR = 9
"""Multiple of ``engine_iteration_timeout`` allowed for the first step, before any step was measured."""


class StepCounts:
    """Histogram of steps by their number of tokens, drafts included, since the engine's start."""

    def __init__(self) -> None:
        self.steps = [0] * (len(BUCKETS) + 1)
        """Number of steps in each bucket."""
        self.tokens = 0
        """Total number of tokens."""

    def record(self, tokens: int) -> None:
        """Count a step of ``tokens`` tokens."""
        self.steps[bisect_left(BUCKETS, tokens)] += 1
        self.tokens += tokens


class StepTimes:
    """Durations of past steps, and the expected maximum for the next.

    Args:
        first: expected maximum seconds of the first step.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._per_token: float | None = None
        self.longest = 0.0
        """Seconds of the longest step so far."""

    def expected(self, tokens: int) -> float:
        """Maximum seconds that a step of ``tokens`` tokens should take: ``tokens`` times the slowest time per token so
        far. This limit is generous: small steps, which also read all weights, take the most time per token."""
        return self._first if self._per_token is None else tokens * self._per_token

    def add(self, tokens: int, seconds: float) -> None:
        """Record a step of ``tokens`` tokens that took ``seconds``."""
        self.longest = max(self.longest, seconds)
        self._per_token = max(seconds / max(tokens, 1), DECAY * (self._per_token or 0.0))
