"""The planner: chooses the sequences of the next step, and the number of tokens of each."""

from __future__ import annotations

import math
from typing import Literal

from penstock.core import EngineRequest

from ..kv.cache_manager import CacheHit
from ..sequence.plan import Plan, ScheduledSequence
from ..sequence.sequence import Sequence, State
from ..spec_decode.speculation import Draft, Speculation
from .admission import Admission
from .preemption import Preemption
from .state import SchedulerState

Hold = Literal["new", "all"]
"""Sequences that are held (not planned): ``new`` ones, which have not started, or ``all``."""
NUM_ISOLATED_STEPS = 8
"""Number of sampling steps for which a suspect is computed alone. If a request is the cause of a death, it causes the
next one when its tokens are recomputed, or in the step after."""


class Planner:
    """Plans steps: running sequences first, then waiting ones, then drafts, while the token budget lasts.

    Args:
        pipeline_stages, max_concurrent_batches: arguments of ``Scheduler``.
    """

    def __init__(
        self,
        state: SchedulerState,
        preemption: Preemption,
        admission: Admission,
        pipeline_stages: int,
        max_concurrent_batches: int,
    ) -> None:
        self._options, self._device_pool, self._kv = state.options, state.device_pool, state.kv
        self._running, self._waiting, self._groups = state.running, state.waiting, state.groups
        self._swap_space, self._encoder_cache = state.swap_space, state.encoder_cache
        self._preemption = preemption
        self._admission = admission
        self._pipeline_stages = pipeline_stages
        self._num_shares = min(pipeline_stages, max_concurrent_batches)
        """Number of steps among which the running sequences are divided."""
        self.holds: dict[str, Hold] = {}
        """Active holds by owner."""
        self.isolated: dict[str, float] = {}
        """Suspects (see ``isolate``): request id → number of sampling steps still to be computed alone."""

    def isolate(self, request: EngineRequest) -> None:
        """Compute a request alone for ``NUM_ISOLATED_STEPS`` sampling steps, since engines have died in steps with it.
        Requests that start again (beams, pooling) are computed alone to their end. Other sequences are preempted."""
        starts_again = request.sampling.use_beam_search or request.pooling
        self.isolated[request.request_id] = math.inf if starts_again else NUM_ISOLATED_STEPS

    def plan(self, speculation: Speculation | None) -> Plan:
        """Plan one step, with drafts of ``speculation``. The plan is empty if no sequence can run now."""
        plan, preemptions = Plan(), self._preemption.count
        suspect = self._suspect() if self.isolated else None
        if suspect and any(one.request.request_id != suspect for one in self._running):
            if not any(one.inflight_steps for one in self._running):
                self._preemption.recompute_all()
            return plan
        if self._kv.offloading:
            plan.stores = self._kv.offloading.take_stores()
            plan.state_stores = self._kv.offloading.take_state_stores()
        if "all" in self.holds.values():
            return plan
        if self._encoder_cache.is_used:
            self._encoder_cache.begin_step()
        budget = self._options.max_num_batched_tokens
        shares = self._num_shares > 1
        left = self._share() if shares else len(self._running)
        for sequence in list(self._running):
            if not budget:
                break
            partial = shares and sequence.is_partial_prefill
            if sequence.state is not State.RUNNING or not (partial or left):
                continue  # an earlier sequence has preempted this one, or another step in flight computes it
            count = min(self._num_new_tokens(sequence, speculation), budget)
            if sequence.request.images:
                count = self._encoder_cache.fit(sequence.request, sequence.num_scheduled, count, budget)
            if count and self._allocate_slots(sequence, count, plan):
                self._schedule(sequence, count, plan)
                budget -= count
                left -= not partial
        joins = not self._running or self._options.batching_type == "inflight"
        if self._waiting and joins and self._preemption.count == preemptions:
            self._schedule_waiting(plan, budget, suspect)
        plan.encoder_tokens = sum(
            audio.length
            for sequence, *_ in plan.scheduled
            if (audio := sequence.request.audio) and sequence.sent_blocks < 0
        )
        if self._encoder_cache.is_used:
            plan.encoder_tokens += self._encoder_cache.num_patches
        if speculation:
            self._schedule_drafts(plan, speculation)
        if suspect and any(item.sampling_sequences for item in plan.scheduled):
            self.isolated[suspect] -= 1
        return plan

    def _suspect(self) -> str | None:
        """The first isolated request that can be computed; None if all are paused or wait for prerequisites."""
        for request_id in list(self.isolated):
            if (group := self._groups.get(request_id)) is None or self.isolated[request_id] <= 0:
                del self.isolated[request_id]
            elif any(self._can_run(one) for one in group.unfinished):
                return request_id
        return None

    def _can_run(self, sequence: Sequence) -> bool:
        """True if a sequence is running, or can be started: it is queued, and neither paused nor held."""
        held = bool(self.holds) and not sequence.has_started
        return not sequence.paused and (sequence in self._running or (sequence in self._waiting and not held))

    def _share(self) -> int:
        """Number of running sequences per step, equal for all steps in flight. Partial prefills do not count: they have
        tokens for every step, and would displace decoding sequences."""
        return -(-sum(not sequence.is_partial_prefill for sequence in self._running) // self._num_shares)

    def _num_new_tokens(self, sequence: Sequence, speculation: Speculation | None) -> int:
        """Number of tokens of a running sequence to compute in this step, before the token budget is applied. 0 while
        the sequence is paused, its drafts are being verified, or its next token depends on a token in flight."""
        total = len(sequence.tokens) + sequence.num_pending
        if sequence.paused or sequence.num_draft_tokens:
            return 0
        if sequence.num_pending and (
            total >= sequence.max_len  # the last token is in flight
            or sequence.num_candidates  # the next beams are selected once all beams have their candidates
            or self._pipeline_stages > 1  # the first stage does not know the token in flight
            or sequence.active_guide  # the allowed tokens depend on the token in flight
            or (sequence.guide and self._kv.snapshots)  # a recurrent state cannot take back a token in flight
            or (speculation and speculation.waits(sequence))  # the draft depends on the token in flight
        ):
            return 0
        threshold = self._options.long_prefill_token_threshold
        return min(total - sequence.num_scheduled, threshold or total)

    def _allocate_slots(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Allocate blocks for ``count`` more tokens, preempting sequences if too few are free. Returns False if the
        sequence cannot be part of this step."""
        num_blocks = self._preemption.make_room(sequence, count, plan)
        if num_blocks:
            plan.copies += self._kv.append_slots(sequence, num_blocks)
        return num_blocks is not None

    def _schedule(self, sequence: Sequence, count: int, plan: Plan) -> None:
        """Add ``count`` tokens of a sequence to the plan; their blocks are allocated."""
        start = sequence.num_scheduled
        sequence.num_scheduled += count
        sequence.inflight_steps += 1
        sampling: tuple[Sequence, ...] = ()
        if sequence.num_scheduled == len(sequence.tokens) + sequence.num_pending and not sequence.pooling_state:
            sampling = (sequence, *self._fork(sequence))
            for one in sampling:
                one.num_pending += 1
        snapshots = self._kv.take_snapshots(sequence, start, start + count)
        plan.scheduled.append(ScheduledSequence(sequence, start, count, sampling, [], [], snapshots))

    def _fork(self, first: Sequence) -> list[Sequence]:
        """Fork the other sequences of a request from ``first`` and start them, when it samples its first token. Returns
        the forked sequences."""
        if not first.num_unforked:
            return []
        siblings = self._groups[first.request.request_id].fork(self._kv)
        self._running.start_forks(first, siblings)
        return siblings

    def _schedule_waiting(self, plan: Plan, budget: int, suspect: str | None) -> None:
        """Start waiting sequences in scheduling order, until one does not fit; only those of ``suspect`` if it is
        set."""
        options = self._options
        partial = [sequence for sequence in self._running if sequence.is_partial_prefill]
        num_long = sum(map(self._waiting.is_long, partial))
        while budget:
            include_long = num_long < options.max_long_partial_prefills
            sequence = self._waiting.peek(include_long, bool(self.holds), suspect)
            if sequence is None or self._running.num_free_rows < 1 + sequence.num_unforked or sequence.swapping_out:
                return
            hit = self._kv.find_cache_hit(sequence)
            remaining = len(sequence.tokens) - hit.num_computed
            count = min(remaining, budget, options.long_prefill_token_threshold or budget)
            if sequence.request.images:
                count = self._encoder_cache.fit(sequence.request, hit.num_computed, count, budget)
                if not count:
                    return
            if count < remaining:
                if not options.enable_chunked_prefill or len(partial) >= options.max_num_partial_prefills:
                    return
                partial.append(sequence)
                num_long += self._waiting.is_long(sequence)
            if not self._start(sequence, hit, count, plan):
                return
            self._schedule(sequence, count, plan)
            budget -= count

    def _start(self, sequence: Sequence, hit: CacheHit, count: int, plan: Plan) -> bool:
        """Start a waiting sequence, with blocks for ``count`` tokens after its cache ``hit``. Returns False if not
        enough blocks are free."""
        loads = self._kv.allocate(sequence, hit, count, alone=not self._running)
        if loads is None:
            return False
        plan.loads += loads.blocks
        plan.state_loads += loads.states
        self._waiting.remove(sequence)
        if sequence.state is State.SWAPPED:
            assert self._swap_space
            plan.swap_in += self._swap_space.swap_in(sequence)
        if sequence.num_cached_tokens is None:
            imported = sequence.num_imported
            self._admission.record_start(sequence, hit.num_computed if imported is None else imported)
        sequence.num_computed = sequence.num_scheduled = hit.num_computed
        self._running.start(sequence)
        return True

    def _schedule_drafts(self, plan: Plan, speculation: Speculation) -> None:
        """Add draft tokens to decoding sequences, within the remaining token budget. Only free blocks are used: no
        sequence is preempted for drafts."""
        decoding = [item for item in plan.scheduled if item.length == 1 and item.sampling_sequences]
        if not decoding or (least := speculation.least_gain(len(decoding))) > 1:
            return
        rows = plan.tokens
        budget, scratch = self._options.max_num_batched_tokens - rows, speculation.num_scratch_blocks
        items, drafts = list[ScheduledSequence](), list[Draft]()
        for item in decoding:
            sequence = item.sequence
            if (
                item.sampling_sequences != (sequence,)
                or sequence.num_pending > 1
                or not sequence.num_output_tokens
                or sequence.num_candidates
            ):
                continue
            max_len = min(budget, sequence.max_len - len(sequence.tokens) - 1)
            draft = speculation.draft(sequence, least, max_len, budget, scratch) if max_len > 0 else None
            if draft and draft.token_ids:
                items.append(item)
                drafts.append(draft)
                scratch -= draft.num_scratch_blocks
        if not drafts:
            return
        for item, draft, chosen in zip(
            items, drafts, speculation.choose_lengths(drafts, len(decoding), rows), strict=True
        ):
            count = min(chosen, len(draft.token_ids) if draft.parents else budget)
            if not count or count > budget:
                continue
            sequence, length = item.sequence, draft.length if draft.parents else count
            num_blocks = self._kv.num_blocks_to_allocate(sequence, length)
            if num_blocks > self._device_pool.num_free:
                continue
            if num_blocks:
                plan.copies += self._kv.append_slots(sequence, num_blocks)
            item.draft.extend(draft.token_ids[:count])
            item.parents.extend(draft.parents)
            sequence.num_draft_tokens = length
            sequence.num_scheduled += length
            budget -= count
