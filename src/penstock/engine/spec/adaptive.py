"""Adaptive speculative decoding: drafts are used only while they raise the throughput, which is measured."""

from __future__ import annotations

TRIAL, HOLD = 16, 512
"""Number of steps with and without drafts that are compared; number of steps until they are compared again."""


class SpeculationTuner:
    """Compares tokens a second with and without drafts, of steps of one batch size, and keeps the faster way."""

    def __init__(self) -> None:
        self.drafting = True
        """Whether the next steps should have drafts."""
        self._begin(TRIAL, switched=True)
        self._rates: dict[bool, float] = {}

    def record_step(self, tokens: int, seconds: float, drafting: bool) -> None:
        """Add a decode step to the measurement, and decide on ``drafting`` anew when there are enough.

        Args:
            tokens: number of tokens that it sampled.
            drafting: the value of ``drafting`` when it was planned. Steps planned before the last change are ignored.
        """
        if drafting is not self.drafting:
            return
        self._left -= 1
        if self._left < self._counted:
            self._tokens += tokens
            self._seconds += seconds
        if self._left:
            return
        self._rates[self.drafting] = self._tokens / max(self._seconds, 1e-9)
        if len(self._rates) == 1:
            self.drafting = not self.drafting
            self._begin(TRIAL, switched=True)
        else:
            better = self._rates[True] >= self._rates[False]
            self._begin(HOLD, switched=better is not self.drafting)
            self.drafting = better
            self._rates.clear()

    def _begin(self, steps: int, switched: bool) -> None:
        """Measure the next ``steps``, without the first two after a change: a drafter may have to catch up in them."""
        self._left, self._counted = steps, steps - 2 * switched
        self._tokens, self._seconds = 0, 0.0
