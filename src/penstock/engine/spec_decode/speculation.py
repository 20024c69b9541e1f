"""Speculative decoding: draft tokens, of which the model can accept several in one step.

The model samples its own token wherever one was drafted, and a draft is accepted as far as it equals these (Leviathan
et al., 2023, with this comparison in place of rejection sampling): the output is the same with and without drafts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from penstock.config.token_tree import TokenTree, depths, scratch_blocks

from ..sequence.plan import Plan, ScheduledSequence
from ..sequence.sequence import Sequence
from ..step import EMPTY, Propose, RowUpdates, StepOutput
from .adaptive import SpeculationTuner

logger = logging.getLogger(__name__)

PLACEHOLDER_TOKEN_ID = -1
"""Stands for a draft token that the workers will propose (``Speculation.fill_placeholders``), as in vLLM."""
MAX_FAILURES = 8
"""Number of errors of a drafter after which speculative decoding is off until the engine restarts."""


class Drafter(Protocol):
    """A drafter in the engine's process, which needs the tokens only."""

    def propose(self, sequence: Sequence, max_len: int) -> list[int]:
        """Draft at most ``max_len`` tokens to follow those of the sequence; may be empty."""
        ...


class Draft(NamedTuple):
    """A draft that is planned."""

    token_ids: list[int]
    """Of all its tokens, or ``PLACEHOLDER_TOKEN_ID``."""
    length: int
    """Number of tokens that can be accepted at most."""
    parents: list[int] = []  # noqa: RUF012 - a tuple's default, never written
    """As ``ScheduledSequence.parents``."""
    num_scratch_blocks: int = 0
    """KV blocks of ``Speculation.num_scratch_blocks`` that verifying it takes."""


@dataclass
class SpecDecodingStats:
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
        drafter: None if the workers draft.
        max_len: maximum length of a draft.
        adaptive: whether to omit drafts at batch sizes where they lower the throughput.
        tree: shape of trees of draft tokens, if the workers draft these; ``max_len`` is its depth.
        block_size: tokens of a KV block.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        max_len: int,
        adaptive: bool = True,
        tree: TokenTree | None = None,
        block_size: int = 64,
    ) -> None:
        self._drafter = drafter
        self._max_len = max_len
        self._tree = tree
        self._block_size = block_size
        self.num_scratch_blocks = tree.scratch_blocks(block_size) if tree else 0
        """KV blocks that trees of one step may take beside those of their sequences."""
        self._adaptive = adaptive
        self._tuners: dict[int, SpeculationTuner] = defaultdict(SpeculationTuner)
        """By the bit length of the number of running sequences."""
        self._failures = 0
        self.stats = SpecDecodingStats(accepted_at=[0] * max_len)

    def should_draft(self, num_running: int) -> bool:
        """True if a step should have drafts that is planned while ``num_running`` sequences run."""
        return not self._disabled and (not self._adaptive or self._tuners[num_running.bit_length()].drafting)

    def draft(self, sequence: Sequence, max_len: int, budget: int, scratch: int) -> Draft | None:
        """Draft tokens to follow those of the sequence. Where the workers draft, returns as many
        ``PLACEHOLDER_TOKEN_ID`` as they should draft, for ``fill_placeholders``.

        Where there is no room for a tree, or each token of a sequence depends on the values of all before it, its first
        path is drafted.

        Args:
            max_len: maximum length.
            budget: maximum number of tokens.
            scratch: KV blocks that are left of ``num_scratch_blocks``.
        """
        length = min(self._max_len if sequence.draft_len is None else sequence.draft_len, max_len)
        if self._disabled or length < 1:
            return None
        if self._tree and not sequence.guide and not sequence.request.sampling.needs_token_values:
            parents = self._tree.up_to(max_len).parents
            blocks = scratch_blocks(parents, len(sequence.tokens), self._block_size)
            if len(parents) <= budget and blocks <= scratch:
                return Draft([PLACEHOLDER_TOKEN_ID] * len(parents), max(depths(parents)), parents, blocks)
        length = min(length, budget)
        if not self._drafter:
            return Draft([PLACEHOLDER_TOKEN_ID] * length, length)
        try:
            token_ids = _acceptable(sequence, self._drafter.propose(sequence, length))
        except Exception as error:
            self._record_failure([sequence], error)
            return None
        return Draft(token_ids, len(token_ids))

    def fill_placeholders(
        self, plan: Plan, updates: RowUpdates, call: Callable[[Propose], list[list[int] | None]]
    ) -> RowUpdates:
        """Replace each ``PLACEHOLDER_TOKEN_ID`` in a plan by a draft token that the workers propose.

        Args:
            updates: the row updates of the plan's step; they are sent with the proposal, if there is one.
            call: has the workers propose drafts; returns one for each row, None if the drafter has failed.

        Returns the updates that are still to be sent with the step.
        """
        items = [item for item in plan.scheduled if PLACEHOLDER_TOKEN_ID in item.draft]
        if not items:
            return updates
        proposed = call(_propose_message(items, updates))
        try:
            for item, draft in zip(items, proposed, strict=True):
                if item.parents:
                    item.draft[:], item.parents[:] = _acceptable_tree(item.sequence, draft or [], item.parents)
                else:
                    item.draft[:] = _acceptable(item.sequence, draft or [])
        except Exception as error:
            for item in items:
                item.draft.clear()
                item.parents.clear()
            self._record_failure([item.sequence for item in items], error)
        else:
            if failed := [item.sequence for item, draft in zip(items, proposed, strict=True) if draft is None]:
                self._record_failure(failed)
        return RowUpdates(forks=updates.forks)  # the step samples for the forked rows, too

    def record_step(self, plan: Plan, output: StepOutput, seconds: float) -> None:
        """Count the draft tokens that a step has accepted, and adapt draft lengths; to be called before
        ``Scheduler.update``.

        Args:
            seconds: time that the step took.
        """
        tokens, outputs = 0, iter(output.sampled)
        for item in plan.scheduled:
            sampled = [next(outputs) for _ in item.sampling_sequences]
            tokens += sum(len(one.token_ids) for one in sampled)
            if item.draft:  # if sampling failed, there are no tokens
                self._record_acceptance(item, max(len(sampled[0].token_ids) - 1, 0))
        if self._adaptive and plan.scheduled and all(item.length == 1 for item in plan.scheduled):
            self._tuners[plan.num_running.bit_length()].record_step(tokens, seconds, plan.drafting)

    @property
    def _disabled(self) -> bool:
        return self._failures >= MAX_FAILURES

    def _record_failure(self, sequences: Iterable[Sequence], error: Exception | None = None) -> None:
        """Record an error of the drafter: these sequences get no more drafts, after ``MAX_FAILURES`` errors no sequence
        does."""
        for sequence in sequences:
            sequence.draft_len = 0
        self._failures += 1
        scope = "for good" if self._disabled else "for its sequences"
        logger.error("speculative decoding failed and ends %s", scope, exc_info=error)

    def _record_acceptance(self, item: ScheduledSequence, accepted: int) -> None:
        stats, sequence, drafted = self.stats, item.sequence, len(item.draft)
        stats.drafts += 1
        stats.draft_tokens += drafted
        stats.accepted_tokens += accepted
        sequence.draft_tokens += drafted
        sequence.accepted_tokens += accepted
        for position in range(accepted):
            stats.accepted_at[position] += 1
        if item.parents:  # trees are as deep as was configured
            return
        length = self._max_len if sequence.draft_len is None else sequence.draft_len
        # As transformers' assisted generation does it by default.
        sequence.draft_len = min(length + 2, self._max_len) if accepted == drafted else max(length - 1, 1)


def _propose_message(items: list[ScheduledSequence], updates: RowUpdates) -> Propose:
    sequences = [item.sequence for item in items]
    return Propose(
        updates,
        np.array([sequence.row for sequence in sequences], np.int32),
        np.array([len(sequence.tokens) for sequence in sequences], np.int32),
        np.array([max(depths(item.parents), default=len(item.draft)) for item in items], np.int32),
        np.array([bool(item.parents) for item in items], np.int32) if any([item.parents for item in items]) else EMPTY,
    )


def _acceptable(sequence: Sequence, draft: list[int]) -> list[int]:
    """The leading draft tokens that the sequence can accept: up to the first that would end it, or that its grammar
    does not allow."""
    stops = _stops(sequence)
    end = next((i for i, token in enumerate(draft) if token in stops), len(draft))
    if sequence.guide and end:
        end = sequence.guide.validate_tokens(draft[:end])
    return draft[:end]


def _acceptable_tree(sequence: Sequence, draft: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """The draft tokens of a tree that the sequence can accept, and their parents: all but those that would end it,
    those that there are not, and what follows them. Such a sequence has no grammar."""
    stops = _stops(sequence)
    kept = {-1: -1}
    token_ids, new_parents = list[int](), list[int]()
    for i, (token, parent) in enumerate(zip(draft, parents, strict=False)):
        if token >= 0 and token not in stops and parent in kept:
            kept[i] = len(token_ids)
            token_ids.append(token)
            new_parents.append(kept[parent])
    return token_ids, new_parents


def _stops(sequence: Sequence) -> frozenset[int]:
    """Tokens that end the sequence; a guide may replace EOS."""
    return sequence.stop_token_ids | frozenset(sequence.request.eos_token_ids if sequence.guide else ())
