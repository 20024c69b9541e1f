"""Bounds on the duration of steps, to tell a long step from one that hangs."""

from __future__ import annotations

DECAY = 0.95
"""Factor of the slowest time per token after each step, so that an outlier is forgotten after some dozens of steps."""
FIRST_STEP_TIMEOUT_FACTOR = 9
"""Multiple of ``engine_iteration_timeout`` that the first step may take, since no step was measured before."""


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
