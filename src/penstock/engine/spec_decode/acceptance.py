"""Estimated acceptance of draft tokens, learned from the tokens that the model samples."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequence_

from ..sequence.draft_state import SEQUENCE_TRIALS, DraftState

PRIOR_TRIALS = 16
"""Number of observations as which the initial rate of a context counts."""
MAX_TRIALS = 1024
"""Number of observations of a context after which they are halved, so that rates follow changes of the load."""
SEQUENCE_DECAY = 0.98
"""Factor of a sequence's earlier observations at each new one."""
MAX_FACTOR, MAX_RATE = 1.3, 0.995
RELAXATION, SEQUENCE_RELAXATION = 0.001, 0.005
"""Share of the difference to the initial value by which unobserved rates and factors return to it at each step."""


class Acceptance:
    """Rates at which draft tokens are accepted, by context, and how much a sequence deviates from them.

    The probability that token ``i`` of a draft is accepted is the product of the rates of tokens 0 to ``i``, the first
    one multiplied by ``accepted / expected`` of the sequence, and each other one by the square root of that, if it is
    below 1.

    Args:
        rates: initial rate of each context.
    """

    def __init__(self, rates: Sequence_[float]) -> None:
        self._initial = list(rates)
        self._rates = list(rates)
        self._trials = [float(PRIOR_TRIALS)] * len(self._rates)

    def probabilities(self, state: DraftState, contexts: list[int]) -> list[float]:
        """Probability of each token of a draft that it and all tokens before it are accepted."""
        rates, result, probability = self._rates, list[float](), 1.0
        factor = min(state.accepted / state.expected, MAX_FACTOR)
        for context in contexts:
            probability *= min(rates[context] * factor, MAX_RATE)
            result.append(probability)
            if len(result) == 1:
                factor = math.sqrt(min(factor, 1.0))
        return result

    def probability(self, state: DraftState, context: int) -> float:
        """Probability that the first token of a draft is accepted."""
        return min(self._rates[context] * min(state.accepted / state.expected, MAX_FACTOR), MAX_RATE)

    def observe(self, state: DraftState, tokens: list[int]) -> None:
        """Compare the sequence's last proposal with its present ``tokens``, whether they were drafted or not."""
        token_ids, contexts = state.proposal
        new, accepted = tokens[state.at : state.at + len(token_ids)], 0
        while accepted < len(new) and new[accepted] == token_ids[accepted]:
            accepted += 1
        self.record(state, contexts[: len(new)], accepted)

    def record(self, state: DraftState, contexts: list[int], accepted: int) -> None:
        """Record that a draft's first ``accepted`` tokens were accepted, and the next one, if there is one, was not."""
        if contexts:
            state.accepted = SEQUENCE_DECAY * state.accepted + (accepted > 0)
            state.expected = SEQUENCE_DECAY * state.expected + self._rates[contexts[0]]
        for position, context in enumerate(contexts[: accepted + 1]):
            trials = self._trials[context] + 1
            self._rates[context] += ((position < accepted) - self._rates[context]) / trials
            self._trials[context] = trials if trials < MAX_TRIALS else trials / 2

    def relax(self, state: DraftState) -> None:
        """Let a sequence without drafts return to the initial estimates, so that drafts are tried again some time."""
        state.accepted += SEQUENCE_RELAXATION * (SEQUENCE_TRIALS - state.accepted)
        state.expected += SEQUENCE_RELAXATION * (SEQUENCE_TRIALS - state.expected)
        for context, initial in enumerate(self._initial):
            self._rates[context] += RELAXATION * (initial - self._rates[context])
