"""Adaptive speculative decoding: drafts are used only while they raise the measured throughput."""

from __future__ import annotations

TRIAL_STEPS = 16
"""Number of steps with drafts, and of steps without drafts, in a comparison of throughputs."""
STEPS_BETWEEN_TRIALS = 512
"""Number of steps in the faster mode before the other mode is tried again."""


class SpeculationTuner:
    """Measures tokens per second with and without drafts, in steps of one batch size, and chooses the faster mode."""

    def __init__(self) -> None:
        self.drafting = True
        """True if the next steps should use drafts."""
        self._start_measuring(TRIAL_STEPS, switched=True)
        self._rates: dict[bool, float] = {}
        """Measured tokens per second, with drafts (True) and without (False)."""

    def record_step(self, tokens: int, seconds: float, drafting: bool) -> None:
        """Add a decode step to the measurement. The last step of a measurement updates ``self.drafting``.

        Args:
            tokens: number of tokens that the step sampled.
            seconds: duration of the step.
            drafting: ``self.drafting`` when the step was planned. Steps planned before the last change are ignored.
        """
        if drafting is not self.drafting:
            return
        self._steps_left -= 1
        if self._steps_left < self._num_measured:
            self._tokens += tokens
            self._seconds += seconds
        if self._steps_left:
            return
        self._rates[self.drafting] = self._tokens / max(self._seconds, 1e-9)
        if len(self._rates) == 1:
            self.drafting = not self.drafting
            self._start_measuring(TRIAL_STEPS, switched=True)
        else:
            better = self._rates[True] >= self._rates[False]
            self._start_measuring(STEPS_BETWEEN_TRIALS, switched=better is not self.drafting)
            self.drafting = better
            self._rates.clear()

    def _start_measuring(self, steps: int, switched: bool) -> None:
        """Measure the next ``steps`` steps. The first two after a switch are not measured, since a drafter may have to
        process earlier tokens in them."""
        self._steps_left, self._num_measured = steps, steps - 2 * switched
        self._tokens, self._seconds = 0, 0.0
