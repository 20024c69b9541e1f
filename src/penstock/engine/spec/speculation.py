"""Speculative decoding: draft tokens, of which the model can accept several in one step.

The model samples its own token wherever one was drafted, and a draft is accepted as far as it equals these (Leviathan
et al., 2023, with the sample itself in place of their test): the output is the same with and without drafts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
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
"""Placeholder of a draft token that the workers will propose (``Speculation.propose``)."""
MOST_FAILURES = 8
"""Number of failures of a drafter after which speculative decoding is off until the engine restarts."""


class Drafter(Protocol):
    """A drafter in the engine's process, which needs the tokens only."""

    def propose(self, sequence: Sequence, max_len: int) -> list[int]:
        """Draft at most ``max_len`` tokens to follow those of the sequence; may be empty."""
        ...


@dataclass
class Counts:
    """Totals since the engine started."""

    drafts: int = 0
    """Number of drafts verified, each of one or more tokens."""
    draft_tokens: int = 0
    """Number of draft tokens verified."""
    accepted_tokens: int = 0
    """Number of draft tokens accepted."""
    accepted_at: list[int] = field(default_factory=list)
    """Number of draft tokens accepted, by position in the draft."""


class Speculation:
    """Drafts tokens for sequences, adapts the lengths of their drafts, and counts what is accepted.

    Args:
        drafter: None where the workers draft.
        max_len: maximum length of a draft.
        adaptive: whether to omit drafts at batch sizes where they lower the throughput.
    """

    def __init__(self, drafter: Drafter | None, max_len: int, adaptive: bool = True) -> None:
        self._drafter = drafter
        self._max_len = max_len
        self._adaptive = adaptive
        self._tuners: dict[int, SpeculationTuner] = defaultdict(SpeculationTuner)
        """By the bit length of the number of running sequences."""
        self._failures = 0
        self.counts = Counts(accepted_at=[0] * max_len)

    def drafts_with(self, num_running: int) -> bool:
        """Whether a step that is planned while so many sequences run should have drafts."""
        return not self._off and (not self._adaptive or self._tuners[num_running.bit_length()].drafting)

    def draft(self, sequence: Sequence, max_len: int) -> list[int]:
        """Draft at most ``max_len`` tokens to follow those of the sequence: their ids, or ``UNKNOWN`` for each that
        ``propose`` will have to fill in. May be empty."""
        length = min(self._max_len if sequence.draft_len is None else sequence.draft_len, max_len)
        if self._off or length < 1:
            return []
        if not self._drafter:
            return [UNKNOWN] * length
        try:
            return _acceptable(sequence, self._drafter.propose(sequence, length))
        except Exception as error:
            self._fail([sequence], error)
            return []

    def propose(self, plan: Plan, updates: RowUpdates, call: Callable[[Propose], list[list[int] | None]]) -> RowUpdates:
        """Replace the ``UNKNOWN`` draft tokens of a plan by those that the workers propose.

        Args:
            updates: the changes that precede the plan's step; they are sent with the proposal, if there is one.
            call: has the workers propose drafts, and returns them; None where the drafter has failed.

        Returns what is left of ``updates`` to be sent with the step.
        """
        items = [item for item in plan.items if UNKNOWN in item.draft]
        if not items:
            return updates
        proposed = call(_message(items, updates))
        try:
            for item, draft in zip(items, proposed, strict=True):
                item.draft[:] = _acceptable(item.sequence, draft or [])
        except Exception as error:
            for item in items:
                item.draft.clear()
            self._fail([item.sequence for item in items], error)
        else:
            if failed := [item.sequence for item, draft in zip(items, proposed, strict=True) if draft is None]:
                self._fail(failed)
        return RowUpdates(forks=updates.forks)  # the step samples for the forked rows, too

    def record_step(self, plan: Plan, output: StepOutput, seconds: float) -> None:
        """Count what a step has accepted, and adapt draft lengths; to be called before ``Scheduler.update``.

        Args:
            seconds: time that the step took.
        """
        tokens, draws = 0, iter(output.draws)
        for item in plan.items:
            drawn = [next(draws) for _ in item.samples]
            tokens += sum(len(draw.token_ids) for draw in drawn)
            if item.draft:  # a failed draw has no tokens
                self._count(item.sequence, len(item.draft), max(len(drawn[0].token_ids) - 1, 0))
        if self._adaptive and all(item.length == 1 for item in plan.items):
            self._tuners[plan.num_running.bit_length()].record_step(tokens, seconds, plan.drafting)

    @property
    def _off(self) -> bool:
        return self._failures >= MOST_FAILURES

    def _fail(self, sequences: Iterable[Sequence], error: Exception | None = None) -> None:
        """Handle an error of the drafter: these sequences get no more drafts; after ``MOST_FAILURES`` none do."""
        for sequence in sequences:
            sequence.draft_len = 0
        self._failures += 1
        scope = "for good" if self._off else "for its sequences"
        logger.error("speculative decoding failed and ends %s", scope, exc_info=error)

    def _count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        counts = self.counts
        counts.drafts += 1
        counts.draft_tokens += drafted
        counts.accepted_tokens += accepted
        sequence.draft_tokens += drafted
        sequence.accepted_tokens += accepted
        for position in range(accepted):
            counts.accepted_at[position] += 1
        length = self._max_len if sequence.draft_len is None else sequence.draft_len
        # As transformers' assisted generation does it by default.
        sequence.draft_len = min(length + 2, self._max_len) if accepted == drafted else max(length - 1, 1)


def _message(items: list[Item], updates: RowUpdates) -> Propose:
    sequences = [item.sequence for item in items]
    return Propose(
        updates,
        np.array([sequence.row for sequence in sequences], np.int32),
        np.array([len(sequence.tokens) for sequence in sequences], np.int32),
        np.array([len(item.draft) for item in items], np.int32),
    )


def _acceptable(sequence: Sequence, draft: list[int]) -> list[int]:
    """The draft up to the first token that would end the sequence, or that its grammar does not allow."""
    stops = sequence.stops | frozenset(
        sequence.request.eos_token_ids if sequence.guide else ()
    )  # a guide may replace EOS
    end = next((i for i, token in enumerate(draft) if token in stops), len(draft))
    if sequence.guide and end:
        end = sequence.guide.validate_tokens(draft[:end])
    return draft[:end]
