"""Speculative decoding: draft tokens, several of which the model can accept in one step.

The model samples a token at each drafted position, and accepts the leading draft tokens that equal the sampled tokens
(Leviathan et al., 2023, with this comparison instead of rejection sampling). The output is the same with and without
drafts.
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
"""Placeholder for a draft token that the workers propose later (``Speculation.fill_placeholders``), as in vLLM."""
MAX_FAILURES = 8
"""Number of drafter errors after which speculative decoding is off until the engine restarts."""


class Drafter(Protocol):
    """A drafter in the engine's process; it uses only the tokens of a sequence."""

    def propose(self, sequence: Sequence, max_len: int) -> list[int]:
        """Draft at most ``max_len`` tokens after the tokens of the sequence; may be empty."""
        ...


class Draft(NamedTuple):
    """A planned draft."""

    token_ids: list[int]
    """Draft tokens; ``PLACEHOLDER_TOKEN_ID`` for each token that the workers will draft."""
    length: int
    """Maximum number of tokens that can be accepted: the number of tokens of a chain, the depth of a tree."""
    parents: list[int] = []  # noqa: RUF012 - a tuple's default, never written
    """Parents in a tree (``ScheduledSequence.parents``); empty for a chain."""
    num_scratch_blocks: int = 0
    """Number of scratch KV blocks (``Speculation.num_scratch_blocks``) needed to verify the draft."""


@dataclass
class SpecDecodingStats:
    """Counts of draft tokens since the engine started."""

    drafts: int = 0
    """Number of verified drafts, each of one or more tokens."""
    draft_tokens: int = 0
    """Number of verified draft tokens."""
    accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    accepted_at: list[int] = field(default_factory=list)
    """Number of accepted draft tokens by position in the draft."""


class Speculation:
    """Drafts tokens for sequences, adapts the length of their drafts, and counts accepted tokens.

    Args:
        drafter: drafter in this process; None if the workers draft.
        max_len: maximum length of a draft.
        adaptive: omit drafts at batch sizes where they lower the throughput.
        tree: shape of token trees, with a depth of ``max_len``; None if drafts are chains.
        block_size: tokens per KV block.
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
        """Number of KV blocks to verify the trees of one step, in addition to those of sequences; 0 without trees."""
        self._adaptive = adaptive
        self._tuners: dict[int, SpeculationTuner] = defaultdict(SpeculationTuner)
        """Tuners by the bit length of the number of running sequences."""
        self._failures = 0
        """Number of drafter errors."""
        self.stats = SpecDecodingStats(accepted_at=[0] * max_len)

    def should_draft(self, num_running: int) -> bool:
        """True if the next step should use drafts, with ``num_running`` running sequences."""
        return not self._disabled and (not self._adaptive or self._tuners[num_running.bit_length()].drafting)

    def draft(self, sequence: Sequence, max_len: int, budget: int, scratch: int) -> Draft | None:
        """Draft tokens to follow the tokens of the sequence. If the workers draft, the draft consists of placeholders
        for ``fill_placeholders``.

        Instead of a tree, only the first path of the tree is drafted if ``budget`` or ``scratch`` is too small, or if
        the sequence has a guide or sampling parameters that depend on all previous tokens.

        Args:
            max_len: maximum length of a chain, or depth of a tree.
            budget: maximum number of tokens.
            scratch: number of scratch KV blocks that this step has not used yet.
        """
        length = min(self._max_len if sequence.draft_len is None else sequence.draft_len, max_len)
        if self._disabled or length < 1:
            return None
        if self._tree and not sequence.active_guide and not sequence.request.sampling.needs_token_values:
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
        """Replace the placeholders in a plan by draft tokens that the workers propose.

        Args:
            updates: row updates of the plan's step, which are sent with ``Propose`` if the plan has placeholders.
            call: runs ``Propose`` in the workers. Returns a draft per row; None if the drafter has failed for the row.

        Returns the updates that remain to be sent with the step.
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
        return RowUpdates(forks=updates.forks)  # the step needs the forks, too, to sample for the forked rows

    def record_step(self, plan: Plan, output: StepOutput, seconds: float) -> None:
        """Count the accepted draft tokens of a step, and adapt draft lengths. Call this before ``Scheduler.update``.

        Args:
            seconds: duration of the step.
        """
        tokens, outputs = 0, iter(output.sampled)
        for item in plan.scheduled:
            sampled = [next(outputs) for _ in item.sampling_sequences]
            tokens += sum(len(one.token_ids) for one in sampled)
            if item.draft:  # if sampling failed, ``token_ids`` is empty
                self._record_acceptance(item, max(len(sampled[0].token_ids) - 1, 0))
        if self._adaptive and plan.scheduled and all(item.length == 1 for item in plan.scheduled):
            self._tuners[plan.num_running.bit_length()].record_step(tokens, seconds, plan.drafting)

    @property
    def _disabled(self) -> bool:
        """True after too many drafter errors."""
        return self._failures >= MAX_FAILURES

    def _record_failure(self, sequences: Iterable[Sequence], error: Exception | None = None) -> None:
        """Record an error of the drafter. ``sequences`` get no more drafts; after ``MAX_FAILURES`` errors, no sequence
        gets drafts."""
        for sequence in sequences:
            sequence.draft_len = 0
        self._failures += 1
        scope = "until the engine restarts" if self._disabled else "for the affected sequences"
        logger.error("drafting failed; speculative decoding is off %s", scope, exc_info=error)

    def _record_acceptance(self, item: ScheduledSequence, accepted: int) -> None:
        """Count the ``accepted`` tokens of a verified draft, and adapt the length of the next draft."""
        stats, sequence, drafted = self.stats, item.sequence, len(item.draft)
        stats.drafts += 1
        stats.draft_tokens += drafted
        stats.accepted_tokens += accepted
        sequence.draft_tokens += drafted
        sequence.accepted_tokens += accepted
        for position in range(accepted):
            stats.accepted_at[position] += 1
        if item.parents:  # trees have a fixed depth
            return
        length = self._max_len if sequence.draft_len is None else sequence.draft_len
        # the default heuristic of transformers' assisted generation
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
    """Leading draft tokens, up to the first token that would end the sequence, or that its grammar does not allow."""
    stops = _stops(sequence)
    end = next((i for i, token in enumerate(draft) if token in stops), len(draft))
    if sequence.guide and end:
        end = sequence.guide.validate_tokens(draft[:end])
    return draft[:end]


def _acceptable_tree(sequence: Sequence, draft: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a drafted tree, without missing tokens (negative), tokens that would end the sequence, and
    the descendants of the removed tokens. The sequence must not have a grammar, but may have an idle guide, which
    removes tokens that complete a trigger."""
    stops = _stops(sequence)
    guides = {-1: sequence.guide} if sequence.guide and sequence.guide.may_trigger(draft) else {}
    kept = {-1: -1}
    token_ids, new_parents = list[int](), list[int]()
    for i, (token, parent) in enumerate(zip(draft, parents, strict=False)):
        if token >= 0 and token not in stops and parent in kept:
            if guides and (guide := guides[parent]):
                if not guide.validate_tokens([token]):
                    continue
                guides[i] = guide.copy()
                guides[i].accept_token(token)
            kept[i] = len(token_ids)
            token_ids.append(token)
            new_parents.append(kept[parent])
    return token_ids, new_parents


def _stops(sequence: Sequence) -> frozenset[int]:
    """Tokens that end the sequence. With a guide, they include EOS, which the guide may replace."""
    return sequence.stop_token_ids | frozenset(sequence.request.eos_token_ids if sequence.guide else ())
