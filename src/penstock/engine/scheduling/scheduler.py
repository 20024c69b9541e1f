"""The scheduler: manages requests from arrival to end, and plans the steps that compute them.

There are no prefill and decode phases. A step has a token budget, and each sequence gets some of the tokens that it has
not computed yet; chunked prefill, decoding, cache hits and recomputation differ only in the number of tokens. Steps may
overlap: ``schedule`` can plan a step while the sampled tokens of the previous step are not known yet. Blocks are freed
only after the last step that uses them.

``Admission`` accepts requests, ``Planner`` plans a step, ``Preemption`` frees blocks for it, ``RunningBatch`` assigns
rows of the workers' batch, ``SequenceGroup`` holds a request's sequences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from penstock.config.options import SchedulerOptions
from penstock.core import Code, EngineRequest, Failure, FinishReason, TokenDelta
from penstock.core.errors import CANCELLED, invalid
from penstock.core.requests import ISOLATED_DEATHS

from ..kv.block_pool import BlockPool
from ..kv.cache_manager import KVCacheManager
from ..kv.offloading import KVOffloading
from ..kv.snapshots import StateSnapshots
from ..kv.swap_space import SwapSpace
from ..sequence.plan import Plan
from ..sequence.sequence import Sequence, State
from ..spec_decode.speculation import Speculation
from ..step import SampledTokens, StepOutput
from .admission import Admission
from .encoder_cache import EncoderCache
from .outputs import append_tokens, error_delta, pool_hidden_states
from .planner import Hold, Planner
from .preemption import Preemption
from .prerequisites import Prerequisite
from .running import RunningBatch
from .sequence_group import SequenceGroup
from .state import SchedulerState
from .step_builder import StepBuilder
from .waiting import WaitingQueue

logger = logging.getLogger(__name__)

REQUEST_FAILED = "request %s failed with an internal error"
"""Log message, with the request's ``log_name``."""
OUTPUT_FAILED = Failure(Code.INTERNAL, "an internal error ended the output; the server's log has the traceback")


class Scheduler:
    """Schedules the sequences of all requests.

    Args:
        device_pool: blocks of the KV cache.
        swap_space: host memory to which sequences are swapped out; None without swapping.
        weights: version of the weights, part of the prefix cache's hashes.
        pipeline_stages: number of pipeline stages of the workers. Each step computes ``1 / pipeline_stages`` of the
            running sequences, so that every stage has a step to compute.
        max_concurrent_batches: maximum number of steps in flight.
        offloading: host and disk tiers of the prefix cache; None without tiers.
        snapshots: snapshots of recurrent states; None for models without such states.

    Raises ``PenstockError`` (``invalid``) if the KV cache cannot hold a single sequence of ``max_model_len``.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        device_pool: BlockPool,
        swap_space: SwapSpace | None = None,
        weights: str = "",
        pipeline_stages: int = 1,
        max_concurrent_batches: int = 1,
        offloading: KVOffloading | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.options = options
        self.device_pool = device_pool
        self.swap_space = swap_space
        self.speculation: Speculation | None = None
        """Speculative decoding; None if it is off."""
        self.encoder_cache = EncoderCache(options.encoder_cache_size, options.max_num_batched_tokens)
        """Cache of image features in the workers."""
        self.builder = StepBuilder(pipeline_stages > 1, self.encoder_cache)
        """Builds the workers' messages from plans."""
        self.before_release: Callable[[Sequence], None] = lambda sequence: None
        """Callback with a sequence that has ended, before its blocks are freed."""
        self.after_request: Callable[[SequenceGroup, Failure | None], None] = lambda group, failure: None
        """Callback with the sequences of a request that has ended, and its failure (None without an error)."""
        self._groups: dict[str, SequenceGroup] = {}
        self._by_uid: dict[int, str] = {}
        """Request ids by ``EngineRequest.uid``."""
        self.kv = KVCacheManager(options, device_pool, weights, offloading, snapshots)
        self.waiting = WaitingQueue(options.scheduling_policy == "priority", options.long_prefill_token_threshold)
        self.running = RunningBatch(options.max_num_seqs, self.kv, self.waiting.schedule_key)
        state = SchedulerState(
            options,
            device_pool,
            swap_space,
            self.kv,
            self.waiting,
            self.running,
            self._groups,
            self.encoder_cache,
            self.builder,
        )
        self.admission = Admission(state)
        self._preemption = Preemption(state)
        self._planner = Planner(state, self._preemption, self.admission, pipeline_stages, max_concurrent_batches)

    # --- Statistics -------------------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens that are still to be computed."""
        firsts = (group.first for group in self._groups.values())
        return sum(max(one.prompt_length - one.num_computed, 0) for one in firsts)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the engine started; the beams of a request count once."""
        return self._preemption.count

    @property
    def num_preempted_sequences(self) -> int:
        """Number of sequences that were preempted at least once since the engine started."""
        return self._preemption.num_sequences

    @property
    def num_preempted_waiting(self) -> int:
        """Number of preempted sequences that are waiting to run again."""
        sequences = (sequence for group in self._groups.values() for sequence in group.sequences)
        return sum(one.state in (State.WAITING, State.SWAPPED) and one.has_started for one in sequences)

    @property
    def num_swapped(self) -> int:
        """Number of preempted sequences whose KV blocks are in host memory."""
        return sum(one.state is State.SWAPPED for group in self._groups.values() for one in group.sequences)

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._groups)

    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._groups)

    def first_sequence(self, request_id: str) -> Sequence:
        """The first sequence of a request that has not ended."""
        return self._groups[request_id].first

    def adapters(self) -> set[str]:
        """Adapters of the unfinished requests; empty string for the base model."""
        return {group.request.adapter for group in self._groups.values()}

    def running_adapters(self) -> set[str]:
        """Adapters of the running sequences; empty string for the base model."""
        return {sequence.request.adapter for sequence in self.running}

    # --- Requests ---------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, prerequisites: Callable[[], list[Prerequisite]] = list) -> None:
        """Queue a request.

        Args:
            prerequisites: called once the request is accepted; the request is queued when all returned prerequisites
                are done.

        Raises ``PenstockError``: ``invalid`` if it can never run, ``overloaded`` if the queue is full.
        """
        request = self.admission.validate_and_clamp(request)
        if request.request_id in self._groups:
            message = f"{request.request_id!r} is the id of an unfinished request: send another id"
            raise invalid("request_id", message)
        sequences = self.admission.new_sequences(request)
        if not (request.resumed or request.accepted):
            self.admission.check_queue(sequences[0])
        self.admission.enqueue(sequences, prerequisites())
        self._groups[request.request_id] = SequenceGroup(sequences)
        if request.uid:
            self._by_uid[request.uid] = request.request_id
        if request.deaths >= ISOLATED_DEATHS:
            self._planner.isolate(request)

    def enqueue_prepared(self) -> list[TokenDelta]:
        """Queue requests with finished prerequisites. Returns the last deltas of requests with failed prerequisites."""
        return self._abort_all(self.admission.enqueue_prepared())

    def expire(self, now: float) -> list[TokenDelta]:
        """End requests whose deadline or ``max_queue_time`` has passed at monotonic time ``now``. Returns their last
        deltas."""
        return self._abort_all(self.admission.overdue(now))

    def _abort_all(self, failures: Iterable[tuple[str, Failure]]) -> list[TokenDelta]:
        return [delta for request_id, failure in failures for delta in self.abort(request_id, failure)]

    def pause(self, request_id: str, paused: bool) -> None:
        """Pause (True) or resume (False) a request. A paused request generates no tokens. It keeps its blocks until it
        is preempted."""
        if group := self._groups.get(request_id):
            for sequence in group.sequences:
                sequence.paused = paused

    def hold(self, owner: str, hold: Hold | None) -> None:
        """Hold new sequences (``new``) or all (``all``): they are not planned until the hold is removed (None).

        Args:
            owner: name of the hold; holds of several owners may be active.
        """
        self._planner.holds.pop(owner, None)
        if hold:
            self._planner.holds[owner] = hold

    @property
    def is_held(self) -> bool:
        """True if all sequences are held: no steps are planned."""
        return "all" in self._planner.holds.values()

    @property
    def has_started_sequences(self) -> bool:
        """True if at least one step has computed an unfinished sequence. Paused sequences are ignored, since their
        clients do not read."""
        return any(one.has_started and not one.paused for group in self._groups.values() for one in group.unfinished)

    def recompute_all(self) -> None:
        """Preempt all sequences, to recompute them from their first tokens. Call this while no step is in flight."""
        self._preemption.recompute_all()
        self.admission.invalidate_free_capacity()

    def forget_kv(self) -> None:
        """Preempt all sequences and invalidate the contents of all KV blocks, before the KV cache is freed."""
        self.recompute_all()
        self.kv.forget_contents()
        self.encoder_cache.clear()

    def set_weights(self, version: str) -> None:
        """Empty the prefix cache, and use a new version of the weights in its hashes. Call this while no sequence has
        KV blocks."""
        for group in self._groups.values():
            for sequence in group.sequences:
                sequence.block_hashes.clear()
        while self.kv.drop_import():
            pass
        self.kv.set_weights(version)
        self.encoder_cache.clear()

    def abort(self, request_id: str, failure: Failure | None = None) -> list[TokenDelta]:
        """End all sequences of a request, with ``failure``, or as cancelled if that is None.

        Returns the last delta of each unfinished sequence. An unknown id (a request that has ended) is ignored.
        """
        group = self._groups.get(request_id)
        if not group:
            return []
        sampling = group.request.sampling
        unforked = range(len(group.sequences), sampling.num_sequences)
        unfinished = group.unfinished
        for sequence in unfinished:
            self._end(sequence)
        self._remove(request_id, failure or CANCELLED)
        reason = FinishReason.ERROR if failure else FinishReason.CANCELLED
        return [
            TokenDelta(request_id=request_id, sequence=index, finished=reason, failure=failure)
            for index in (*(sequence.index for sequence in unfinished), *unforked)
            if index < sampling.num_returned
        ]

    def abort_older(self, uid: int) -> None:
        """Cancel the unfinished request with this ``EngineRequest.uid``, if there is one, before it is added again."""
        if request_id := self._by_uid.get(uid):
            self.abort(request_id)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End a sequence because its text contains a stop string. No delta is returned for it."""
        if group := self._groups.get(request_id):
            for sequence in group.unfinished:
                if sequence.index == index:
                    self._end(sequence)
                    self._remove_if_ended(request_id)

    def _end(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or the batch. Its blocks are freed once no step in flight uses them."""
        self.before_release(sequence)
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif not self.admission.remove_sequence(sequence):
            self.waiting.remove(sequence)
            if self.swap_space:
                self.swap_space.release(sequence)
            self.kv.release_imported(sequence)
        sequence.state = State.FINISHED
        if self.speculation:
            self.speculation.forget(sequence)
        self.running.free(sequence)
        self.admission.invalidate_free_capacity()

    def _remove_if_ended(self, request_id: str, failure: Failure | None = None) -> None:
        if not self._groups[request_id].unfinished:
            self._remove(request_id, failure)

    def _remove(self, request_id: str, failure: Failure | None = None) -> None:
        """Remove a request whose sequences have all ended, the last one with ``failure`` (None without an error)."""
        group = self._groups.pop(request_id)
        self._by_uid.pop(group.request.uid, None)
        self.builder.drop_beam_steps(request_id)
        self.admission.remove_request(group.first)
        self.after_request(group, failure)

    # --- Steps ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Plan one step. The plan is empty if no sequence can run now; sequences may be waiting for a step in flight
        to be collected."""
        self.admission.invalidate_free_capacity()
        return self._planner.plan(self.speculation)

    def fail(self, plan: Plan, failure: Failure) -> list[TokenDelta]:
        """End all requests of a step that could not be sent or computed. Returns their last deltas."""
        self.encoder_cache.clear()
        for item in plan.scheduled:
            self.kv.keep_snapshots(item.sequence, item.snapshots, False)
            for sequence in {item.sequence, *item.sampling_sequences}:
                sequence.inflight_steps -= 1
        requests = {item.sequence.request.request_id for item in plan.scheduled}
        deltas = [delta for request_id in requests for delta in self.abort(request_id, failure)]
        self._preemption.cancel_swaps(plan)
        if self.kv.offloading:
            self.kv.offloading.cancel(plan)
        for item in plan.scheduled:
            for sequence in (item.sequence, *item.sampling_sequences):
                self.running.free(sequence)
        return deltas

    def update(self, plan: Plan, output: StepOutput) -> list[TokenDelta]:
        """Process the output of the oldest step in flight. Returns a delta for each sequence with new output."""
        self.admission.invalidate_free_capacity()
        self._preemption.confirm_swaps(plan)
        if self.kv.offloading and (plan.stores or plan.loads or plan.state_stores or plan.state_loads):
            self.kv.offloading.confirm(plan)
        deltas: list[TokenDelta] = []
        outputs = iter(output.sampled)
        for i, item in enumerate(plan.scheduled):
            first, end = item.sequence, item.start + item.length
            sampled = [next(outputs) for _ in item.sampling_sequences]
            is_valid = not first.num_stale and first.state is not State.FINISHED
            if first.num_stale:
                self._set_computed(first, first.num_computed, first.num_computed)
            elif first.num_draft_tokens and sampled and sampled[0].failure and not self.kv.snapshots:
                # A draft token may have made all logits of the sequence NaN: compute its last token again without it.
                first.drafts.failed = True
                first.num_scheduled, first.num_draft_tokens = item.start, 0
                first.num_pending -= 1
                self._set_computed(first, item.start, item.start)
                continue
            elif first.num_draft_tokens and sampled:  # all but the last sampled token are accepted drafts
                accepted = sampled[0].token_ids[:-1]
                end += len(accepted)
                first.num_scheduled, first.num_draft_tokens = end, 0
                self._set_computed(first, item.start, end, accepted)
            else:
                self._set_computed(first, item.start, end)
            self.kv.keep_snapshots(first, item.snapshots, is_valid)
            if any(one.failure and one.failure.code is Code.INTERNAL for one in sampled):
                self.kv.uncache(first)
            if first.prompt_logprobs is not None:
                first.prompt_logprobs += output.prompt_logprobs.get(i, [])
            if first.context_logits is not None and i in output.context_logits:
                first.context_logits.append(output.context_logits[i])
            if first.pooling_state and first.state is not State.FINISHED and i in output.pooler_hidden_states:
                deltas += self._finish_if_done(first, pool_hidden_states(first, output.pooler_hidden_states[i]))
            if sampled and not first.first_token:
                first.first_token = time.monotonic()
            for sequence, one in zip(item.sampling_sequences, sampled, strict=True):
                if sequence is not first:
                    self._set_computed(sequence, end, end)
                sequence.num_pending -= 1
                if sequence.state is State.FINISHED:
                    continue
                if sequence.num_stale:
                    sequence.num_stale -= 1
                    continue
                deltas += (
                    self._add_candidates(sequence, one) if sequence.num_candidates else self._append(sequence, one)
                )
        return deltas

    def _set_computed(self, sequence: Sequence, start: int, end: int, accepted: list[int] | None = None) -> None:
        """Record that a step has computed tokens ``start`` to ``end`` of a sequence, and cache its full blocks.

        Args:
            accepted: accepted draft tokens, which are the last computed tokens, and not yet appended to the sequence.
        """
        sequence.inflight_steps -= 1
        if sequence.state is State.FINISHED:
            self.running.free(sequence)
            return
        sequence.num_computed = end
        self.kv.cache_full_blocks(sequence, start, end, accepted or [])

    def _append(self, sequence: Sequence, sampled: SampledTokens) -> list[TokenDelta]:
        """Append sampled tokens. An exception (of a grammar backend) ends only this sequence."""
        try:
            delta = append_tokens(sequence, sampled)
        except Exception:
            request = sequence.request
            logger.exception(REQUEST_FAILED, request.log_name, extra={"fields": request.log_fields})
            delta = error_delta(sequence, OUTPUT_FAILED)
        return self._finish_if_done(sequence, delta)

    def _finish_if_done(self, sequence: Sequence, delta: TokenDelta | None) -> list[TokenDelta]:
        """End the sequence if ``delta`` is its last. Returns a list of the delta; empty if ``delta`` is None."""
        if delta and delta.finished:
            self._end(sequence)
            self._remove_if_ended(sequence.request.request_id, delta.failure)
        return [delta] if delta else []

    def _add_candidates(self, beam: Sequence, sampled: SampledTokens) -> list[TokenDelta]:
        """Add a beam's candidates to its search. Once all beams have candidates, the search selects the next beams, or
        ends. Returns the deltas of the returned sequences when the search has ended."""
        request_id = beam.request.request_id
        if sampled.failure:
            return self.abort(request_id, sampled.failure)
        group = self._groups[request_id]
        assert group.search and sampled.candidates is not None
        group.search.add_candidates(beam.index, sampled.candidates)
        if not group.search.ready:
            return []
        try:
            beam_steps = group.search.select(group.sequences)
        except Exception:
            logger.exception(REQUEST_FAILED, group.request.log_name, extra={"fields": group.request.log_fields})
            return self.abort(request_id, OUTPUT_FAILED)
        if beam_steps:
            self.builder.add_beam_steps(request_id, group.reorder_beams(beam_steps, self.kv))
            return []
        for one in group.sequences:
            self._end(one)
        self._remove(request_id)
        return group.search.deltas(group.sequences)
