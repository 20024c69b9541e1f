"""How many tokens steps compute, as counts for a histogram."""

from __future__ import annotations

from bisect import bisect_left

BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds, tokens; a last bucket has all larger steps."""


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
