"""Speculative decoding: draft tokens, of which the model confirms several in one step.

The model samples its own token wherever one was drafted, and drafts are kept as far as they are what it sampled
(Leviathan et al., 2023, with the sample itself in place of their test): an output is the same with and without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..sequence.plan import Item, Plan
from ..sequence.sequence import Sequence
from ..step import Propose, RowUpdates, StepOutput
from .adaptive import SpeculationTuner

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""Stands for a draft token that the workers propose once its block is there."""
MOST_FAILURES = 8
"""Of a drafter since the engine started, after which nothing is drafted any more."""


class Drafter(Protocol):
    """Drafts from the tokens alone."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """What may come after the tokens of a sequence, at most so many."""
        ...


@dataclass
class Counts:
    """Since the engine started."""

    drafts: int = 0
    """Times that tokens were drafted."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """By place in the draft."""


class Speculation:
    """Who gets drafts, of what length, how often they were right, and whether that pays.

    Args:
        drafter: None where the workers draft.
        most: draft tokens at a time.
        adaptive: whether to stop where it does not pay.
    """

    def __init__(self, drafter: Drafter | None, most: int, adaptive: bool = True) -> None:
        self._drafter = drafter
        self._most = most
        self._trials: dict[int, SpeculationTuner] | None = {} if adaptive else None
        self._drafting = True
        self._failures = 0
        self._size = 0
        """Of the step that is planned, in powers of two: whether drafts pay depends on it."""
        self.counts = Counts(accepted_at=[0] * most)

    def begin(self, sequences: int) -> None:
        """A step is planned for so many sequences."""
        self._size = sequences.bit_length()
        if self._trials is not None:
            self._drafting = self._trials.setdefault(self._size, SpeculationTuner()).drafting

    @property
    def active(self) -> bool:
        """Whether steps have drafts now."""
        return self._drafting and not self._off

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """What may come next, at most so many tokens; ``UNKNOWN`` for those that the workers will propose."""
        length = min(self._most if sequence.draft_len is None else sequence.draft_len, most)
        if not self.active or length < 1:
            return []
        if not self._drafter:
            return [UNKNOWN] * length
        try:
            return _possible(sequence, self._drafter.propose(sequence, length))
        except Exception:
            self._fail([sequence])
            return []

    def fill(self, plan: Plan, updates: RowUpdates, propose: Callable[[Propose], list[list[int]]]) -> RowUpdates:
        """Have the workers propose drafts in the place of ``UNKNOWN``.

        Returns what they do not know yet of ``updates``.
        """
        items = [item for item in plan.items if UNKNOWN in item.draft]
        if not items:
            return updates
        proposed = propose(_wanted(items, updates))
        try:
            for item, draft in zip(items, proposed, strict=True):
                item.draft[:] = _possible(item.sequence, draft)
        except Exception:
            for item in items:
                item.draft.clear()
            self._fail(item.sequence for item in items)
        return RowUpdates(forks=updates.forks)  # which the step has to know of

    def verified(self, plan: Plan, output: StepOutput, seconds: float) -> None:
        """A step has taken so long. To be told before its tokens are appended."""
        tokens, draws = 0, iter(output.draws)
        for item in plan.items:
            drawn = [next(draws) for _ in item.samples]
            tokens += sum(len(draw.token_ids) for draw in drawn)
            if item.draft:
                self._count(item.sequence, len(item.draft), len(drawn[0].token_ids) - 1)
        if self._trials is not None and all(item.length == 1 for item in plan.items):
            self._trials[self._size].note(tokens, seconds)

    @property
    def _off(self) -> bool:
        return self._failures >= MOST_FAILURES

    def _fail(self, sequences: Iterable[Sequence]) -> None:
        """A drafter has failed: these sequences go on without drafts, and all do where it fails again and again."""
        for sequence in sequences:
            sequence.draft_len = 0
        self._failures += 1
        logger.exception("speculative decoding failed and ends %s", "for good" if self._off else "for its sequences")

    def _count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        counts = self.counts
        counts.drafts += 1
        counts.draft_tokens += drafted
        counts.accepted_tokens += accepted
        sequence.draft_tokens += drafted
        sequence.accepted_tokens += accepted
        for place in range(accepted):
            counts.accepted_at[place] += 1
        length = self._most if sequence.draft_len is None else sequence.draft_len
        # As transformers' assisted generation does it by default.
        sequence.draft_len = min(length + 2, self._most) if accepted == drafted else max(length - 1, 1)


def _wanted(items: list[Item], updates: RowUpdates) -> Propose:
    sequences = [item.sequence for item in items]
    return Propose(
        updates,
        np.array([sequence.row for sequence in sequences], np.int32),
        np.array([len(sequence.tokens) for sequence in sequences], np.int32),
        np.array([len(item.draft) for item in items], np.int32),
    )


def _possible(sequence: Sequence, draft: list[int]) -> list[int]:
    """Up to the token that would end the sequence, or that its grammar does not allow."""
    ends = sequence.stops | frozenset(sequence.request.eos_token_ids if sequence.guide else ())  # which it may replace
    end = next((i for i, token in enumerate(draft) if token in ends), len(draft))
    if sequence.guide and end:
        end = sequence.guide.allows(draft[:end])
    return draft[:end]
