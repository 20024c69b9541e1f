"""Whether speculative decoding pays: measured, as steps go on."""

from __future__ import annotations

TRIAL, HOLD = 16, 512
"""Steps with and without drafts that are compared, and steps until they are compared again."""


class SpeculationTuner:
    """Tries by turns whether more tokens a second come with drafts or without, and stays with what is better."""

    def __init__(self) -> None:
        self.drafting = True
        self._begin(TRIAL, switched=True)
        self._rates: dict[bool, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """A step brought so many tokens in so much time."""
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
        """The first steps after a change have to make up for what was not done before it, and do not count."""
        self._left, self._counted = steps, steps - 2 * switched
        self._tokens, self._seconds = 0, 0.0
