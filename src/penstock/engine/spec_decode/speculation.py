"""Speculative decoding: draft tokens, several of which the model can accept in one step.

The model samples a token at each drafted position, and accepts the leading draft tokens that equal the sampled tokens
(Leviathan et al., 2023, with this comparison instead of rejection sampling). The output is the same with and without
drafts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from penstock.config.token_tree import TokenTree, depths, scratch_blocks

from ..sequence.draft_state import DraftState, Proposal
from ..sequence.plan import Plan, ScheduledSequence
from ..sequence.sequence import Sequence
from ..step import EMPTY, Propose, RowUpdates, StepOutput
from .acceptance import Acceptance
from .step_time import StepTime

logger = logging.getLogger(__name__)

PLACEHOLDER_TOKEN_ID = -1
"""Placeholder for a draft token that the workers propose later (``Speculation.fill_placeholders``), as in vLLM."""
MAX_FAILURES = 8
"""Number of drafter errors after which speculative decoding is off until the engine restarts."""


MIN_GAIN = 0.3
"""Expected number of accepted draft tokens for which a sequence waits for its token in flight."""
MAX_PROBABILITY = 0.97
"""If a draft token must be accepted more probably than this to pay, drafts are not even looked up."""
INITIAL_RATE = 0.7
"""Initial rate at which tokens of draft models and draft heads are accepted."""
STEP_RATIO, DRAFTING_RATIO = 0.1, 1.0
"""Initial ratio of the time per row of a step, and per token of a draft, to the constant part of the time."""


class Drafter(Protocol):
    """A drafter in the engine's process; it uses only the tokens of a sequence."""

    rates: Sequence_[float]
    """Initial acceptance rate of each context of its proposals."""

    def propose(self, sequence: Sequence, state: DraftState) -> Proposal:
        """Draft tokens to follow the tokens of the sequence, or none. If it is one token, ``extend`` may add more."""
        ...

    def extend(self, sequence: Sequence, state: DraftState, max_len: int) -> Proposal:
        """Extend ``state.proposal``, of one token, to at most ``max_len`` tokens."""
        ...

    def remember(self, sequence: Sequence) -> None:
        """Called with each sequence that ends."""
        ...


class Draft(NamedTuple):
    """A possible draft of a sequence."""

    token_ids: list[int]
    """Draft tokens; ``PLACEHOLDER_TOKEN_ID`` for each token that the workers will draft."""
    gains: list[float]
    """Expected number of accepted tokens that each further token of a chain adds, or that the tree adds."""
    parents: list[int] = []  # noqa: RUF012 - a tuple's default, never written
    """Parents in a tree (``ScheduledSequence.parents``); empty for a chain."""
    num_scratch_blocks: int = 0
    """Number of scratch KV blocks (``Speculation.num_scratch_blocks``) needed to verify the draft."""

    @property
    def length(self) -> int:
        """Maximum number of tokens that can be accepted: the number of tokens of a chain, the depth of a tree."""
        return max(depths(self.parents)) if self.parents else len(self.token_ids)


@dataclass
class SpecDecodingStats:
    """Counts of draft tokens since the engine started."""

    drafts: int = 0
    """Number of verified drafts, each of one or more tokens."""
    draft_tokens: int = 0
    """Number of verified draft tokens."""
    accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    decoded_rows: int = 0
    """Number of tokens that steps sampled after the first token of a sequence, not counting accepted draft tokens."""
    decode_seconds: float = 0.0
    """Duration of the steps without prompt tokens."""
    seconds_without_drafts: float = 0.0
    """Estimated duration of the same steps' tokens without drafts."""
    accepted_at: list[int] = field(default_factory=list)
    """Number of accepted draft tokens by position in the draft."""


class Speculation:
    """Drafts tokens for sequences, chooses the length of their drafts, and counts accepted tokens.

    The lengths in a step are those that maximize the expected number of tokens per second::

        (sequences + gains of all draft tokens) / (step time at sequences + draft tokens + drafting time)

    where the gain of a draft token is the probability that it and all tokens before it are accepted (``Acceptance``),
    and the times are measured (``StepTime``). The gains of a sequence decrease, so that the maximum is found by taking
    the draft tokens of all sequences in the order of their gains until the next one would lower the rate. Prompt tokens
    in the step count as the tokens that a step without prompts generates in the time that they take.

    Args:
        drafter: drafter in this process; None if the workers draft.
        max_len: maximum length of a draft.
        adaptive: choose the lengths; else all drafts are as long as possible.
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
        self._acceptance = Acceptance(drafter.rates if drafter else [INITIAL_RATE] * max_len)
        self._step_time, self._drafting_time = StepTime(STEP_RATIO), StepTime(DRAFTING_RATIO)
        self._failures = 0
        """Number of drafter errors."""
        self.stats = SpecDecodingStats(accepted_at=[0] * max_len)

    def waits(self, sequence: Sequence) -> bool:
        """True if a sequence should wait for its token in flight, to be drafted after it, instead of being computed in
        a further step meanwhile."""
        if self._disabled or sequence.drafts.failed:
            return False
        if not self._adaptive:
            return True
        try:
            return sum(self._gains(sequence, self._least_gain(1))) > MIN_GAIN
        except Exception as error:
            self._record_failure([sequence], error)
            return False

    def least_gain(self, sequences: int) -> float:
        """Expected gain of a draft token that is worth drafting in a step with this number of decoding sequences; above
        1 if no token is."""
        if self._disabled:
            return math.inf
        least = self._least_gain(sequences) if self._adaptive else 0.0
        return least if least < MAX_PROBABILITY else math.inf

    def draft(self, sequence: Sequence, least: float, max_len: int, budget: int, scratch: int) -> Draft | None:
        """Draft tokens to follow the tokens of the sequence. If the workers draft, the draft consists of placeholders
        for ``fill_placeholders``.

        Instead of a tree, only the first path of the tree is drafted if ``budget`` or ``scratch`` is too small, or if
        the sequence has a guide or sampling parameters that depend on all previous tokens.

        Args:
            least: ``least_gain`` of the step.
            max_len: maximum length of a chain, or depth of a tree.
            budget: maximum number of tokens.
            scratch: number of scratch KV blocks that this step has not used yet.
        """
        state = sequence.drafts
        if self._disabled or state.failed or max_len < 1:
            return None
        try:
            gains = self._gains(sequence, least)[: min(max_len, budget)]
            if not gains:
                return None
            if self._drafter:
                token_ids = _acceptable(sequence, state.proposal.token_ids[: len(gains)])
                return Draft(token_ids, gains[: len(token_ids)])
        except Exception as error:
            self._record_failure([sequence], error)
            return None
        if self._tree and not sequence.active_guide and not sequence.request.sampling.needs_token_values:
            parents = self._tree.up_to(max_len).parents
            blocks = scratch_blocks(parents, len(sequence.tokens), self._block_size)
            if len(parents) <= budget and blocks <= scratch:
                return Draft([PLACEHOLDER_TOKEN_ID] * len(parents), [sum(gains)], parents, blocks)
        return Draft([PLACEHOLDER_TOKEN_ID] * len(gains), gains)

    def choose_lengths(self, drafts: list[Draft], sequences: int, rows: int) -> list[int]:
        """Number of tokens of each draft to verify: all of them, or fewer (or none) of a chain, all or none of a tree.

        Args:
            sequences: number of decoding sequences of the step.
            rows: number of tokens of the step without drafts.
        """
        if not self._adaptive:
            return [len(draft.token_ids) for draft in drafts]
        step = self._step_time
        least = self._least_gain(sequences)
        order = sorted(
            [
                (gain / size, gain, depth, i, size)
                for i, draft in enumerate(drafts)
                for size in (len(draft.parents) or 1,)
                for depth, gain in enumerate(draft.gains)
                if gain > least * size
            ],
            reverse=True,
        )
        lengths = [0] * len(drafts)
        if not order:
            return lengths
        seconds = step.seconds(rows)
        tokens = sequences * seconds / step.seconds(sequences)
        best, best_count, best_depth = tokens / seconds, 0, 0
        for depth_limit in [self._max_len] if self._drafter else range(1, self._max_len + 1):
            value, total, drafting = tokens, rows, 0.0
            if not self._drafter and self._drafting_time.steps:
                drafting = self._drafting_time.seconds(depth_limit)
            for count, (_, gain, depth, _, size) in enumerate(order, 1):
                if depth < depth_limit:
                    value, total = value + gain, total + size
                    rate = value / (step.seconds(total) + drafting)
                    if rate > best:
                        best, best_count, best_depth = rate, count, depth_limit
        for _, _, depth, i, size in order[:best_count]:
            if depth < best_depth:
                lengths[i] += size
        return lengths

    def _least_gain(self, sequences: int) -> float:
        """Gain below which a draft token lowers the rate of a step with this number of sequences, by the slope."""
        return self._step_time.slope * sequences / self._step_time.seconds(sequences)

    def _gains(self, sequence: Sequence, least: float) -> list[float]:
        """Gains of the tokens that the drafter proposes now; empty if the first one is below ``least``. Compares the
        previous proposal with the new tokens."""
        state, length = sequence.drafts, len(sequence.tokens)
        if state.at != length:
            if state.proposal.token_ids:
                self._acceptance.observe(state, sequence.tokens)
            elif not self._drafter:
                self._acceptance.relax(state)
            if self._drafter:
                state.proposal = self._drafter.propose(sequence, state)
            else:
                state.proposal = Proposal([], list(range(self._max_len)))
            state.at = length
        if not state.proposal.contexts or self._acceptance.probability(state, state.proposal.contexts[0]) < least:
            return []
        if self._drafter and len(state.proposal.token_ids) == 1:
            state.proposal = self._drafter.extend(sequence, state, self._max_len)
        return self._acceptance.probabilities(state, state.proposal.contexts[: self._max_len])

    def forget(self, sequence: Sequence) -> None:
        """Called with each sequence that ends."""
        if self._drafter:
            self._drafter.remember(sequence)
        sequence.drafts = DraftState()

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
        started = time.perf_counter()
        proposed = call(_propose_message(items, updates))
        plan.drafting_seconds = time.perf_counter() - started
        self._drafting_time.record(max(item.sequence.num_draft_tokens for item in items), plan.drafting_seconds)
        try:
            for item, draft in zip(items, proposed, strict=True):
                if item.parents:
                    item.draft[:], item.parents[:] = _acceptable_tree(item.sequence, draft or [], item.parents)
                else:
                    item.draft[:] = _acceptable(item.sequence, draft or [])
                    state = item.sequence.drafts
                    state.proposal = Proposal([*item.draft], state.proposal.contexts[: len(item.draft)])
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
        """Count the accepted draft tokens of a step, and record its duration. Call this before ``Scheduler.update``.

        Args:
            seconds: duration of the step.
        """
        outputs, stats, accepted_tokens = iter(output.sampled), self.stats, self.stats.accepted_tokens
        for item in plan.scheduled:
            sampled = [next(outputs) for _ in item.sampling_sequences]
            if item.draft:  # if sampling failed, ``token_ids`` is empty
                self._count(item, max(len(sampled[0].token_ids) - 1, 0))
            if item.length == 1:
                stats.decoded_rows += len(sampled)
        if plan.scheduled and not plan.encoder_tokens and all([item.length == 1 for item in plan.scheduled]):
            rows = len(plan.scheduled)
            self._step_time.record(plan.tokens, seconds - plan.drafting_seconds)
            without = seconds if rows == plan.tokens else self._step_time.seconds(rows)
            stats.decode_seconds += seconds
            stats.seconds_without_drafts += without * (1 + (stats.accepted_tokens - accepted_tokens) / rows)

    @property
    def _disabled(self) -> bool:
        """True after too many drafter errors."""
        return self._failures >= MAX_FAILURES

    def _record_failure(self, sequences: Iterable[Sequence], error: Exception | None = None) -> None:
        """Record an error of the drafter. ``sequences`` get no more drafts; after ``MAX_FAILURES`` errors, no sequence
        gets drafts."""
        for sequence in sequences:
            sequence.drafts.failed = True
        self._failures += 1
        scope = "until the engine restarts" if self._disabled else "for the affected sequences"
        logger.error("drafting failed; speculative decoding is off %s", scope, exc_info=error)

    def _count(self, item: ScheduledSequence, accepted: int) -> None:
        """Count the ``accepted`` tokens of a verified draft."""
        stats, sequence, drafted = self.stats, item.sequence, len(item.draft)
        stats.drafts += 1
        stats.draft_tokens += drafted
        stats.accepted_tokens += accepted
        sequence.draft_tokens += drafted
        sequence.accepted_tokens += accepted
        for position in range(accepted):
            stats.accepted_at[position] += 1
        if item.parents:
            self._acceptance.record(sequence.drafts, list(range(max(depths(item.parents)))), accepted)


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
