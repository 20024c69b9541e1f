"""The scheduler: who runs in the next step, how many tokens each, in which KV blocks. Which requests come in is
``Admission``'s.

There are no phases. A step has a budget of tokens, every sequence asks for the tokens it has not computed yet, and
prefill, chunks of it, decoding, cache hits and computing again after preemption are the same thing with other
numbers. Steps may overlap: ``schedule`` can plan the next one before the last is collected, whose token is then
still unknown, and blocks are given back only after the last step that uses them.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from penstock.config.options import SchedulerOptions
from penstock.core import Code, EngineRequest, Failure, FinishReason, PenstockError, TokenDelta
from penstock.core.errors import invalid

from ..kv.block_pool import BlockPool
from ..kv.cache_manager import CacheHit, KVCacheManager, StartableCount
from ..sequence.beam_search import BeamSearch
from ..sequence.plan import Item, Plan
from ..sequence.sequence import Sequence, State
from ..spec.speculation import Speculation
from ..step import Draw, StepOutput
from .admission import Admission
from .outputs import append, failed, pool
from .prerequisites import Prerequisite
from .step_builder import StepBuilder
from .waiting import Waiting

logger = logging.getLogger(__name__)

CANNOT_GO_ON = Failure(Code.INTERNAL, "the output cannot go on; the log says why")


class Scheduler:
    """Sequences from arrival to their end.

    Args:
        device: blocks of the KV cache.
        host: blocks of the host tier, where swapped sequences wait; None where there is no such tier.
        weights: names the weights in the prefix cache.
        slots: of LoRA adapters, by what requests are marked with.

    Raises ``PenstockError`` (``invalid``) where the cache cannot hold a single sequence of ``max_model_len``.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        device: BlockPool,
        host: BlockPool | None = None,
        weights: str = "",
        slots: Mapping[str, int] | None = None,
    ) -> None:
        self.options = options
        self.device = device
        self.host = host
        self.waiting = Waiting(options.scheduling_policy == "priority", options.long_prefill_token_threshold)
        self.running: list[Sequence] = []
        """In the order of ``Waiting.turn``; the last one is preempted first."""
        self.preemptions = 0
        self.speculation: Speculation | None = None
        """Speculative decoding; None where it is off."""
        self._kv = KVCacheManager(options, device, host, weights)
        self.admission = Admission(options, device, self._kv, self.waiting)
        self.builder = StepBuilder(slots)
        """Makes messages of plans."""
        self._groups: dict[str, list[Sequence]] = {}
        self._searches: dict[str, BeamSearch] = {}
        """By request, of those that search."""
        self._startable: StartableCount | None = None
        """Of those who wait; None where it is to be counted anew."""
        self._rows = list(range(options.max_num_seqs - 1, -1, -1))
        self._reserved_rows = 0

    # --- Requests come and go ---------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, be it for a prerequisite."""
        return len(self.waiting) + len(self.admission.prerequisites)

    def _has_room(self, newcomer: Sequence) -> bool:
        """Whether one more may wait. Those who wait and can start at once, for whom batch slots and KV blocks are free,
        do not count."""
        if self.num_waiting < self.options.max_waiting:
            return True
        if self._startable is None:
            joins = not self.running or self.options.batching_type == "inflight"
            slots = len(self._rows) - self._reserved_rows if joins else 0
            self._startable = StartableCount(self._kv, slots, alone=not self.running)
            for sequence in (*self.waiting, *self.admission.prerequisites):
                self._startable.add(sequence, self._num_unforked(sequence))
        started = self._startable.count + self._startable.fits(newcomer, newcomer.request.sampling.width - 1)
        return self.num_waiting - started < self.options.max_waiting

    def add(self, request: EngineRequest, prerequisites: Callable[[], list[Prerequisite]] = list) -> None:
        """Queue a request, which runs once its prerequisites are there; they are asked for where it is accepted.

        Raises ``PenstockError``: ``invalid`` where it can never run, ``overloaded`` where the queue is full.
        """
        request = self.admission.fitted(request)
        if request.request_id in self._groups:
            raise invalid("request_id", f"{request.request_id!r} is in use")
        first = self.admission.sequence(request)
        if not self._has_room(first):
            raise PenstockError(
                Code.OVERLOADED, f"{self.num_waiting} sequences are waiting", "max_waiting", self.options.max_waiting
            )
        self.admission.accept(first, prerequisites())
        if self._startable:
            self._startable.add(first, request.sampling.width - 1)
        self._groups[request.request_id] = [first]
        if request.sampling.use_beam_search:
            search = self._searches[request.request_id] = BeamSearch(first)
            first.num_candidates = search.num_candidates

    def admit_ready(self) -> list[TokenDelta]:
        """Queue requests whose prerequisites are there; returns the last deltas of those whose have failed."""
        return self._abort_all(self.admission.admit_ready())

    def expire(self, now: float) -> list[TokenDelta]:
        """End requests whose deadline has passed, or who have waited too long; ``now`` is on the same clock."""
        return self._abort_all(self.admission.overdue(now))

    def _abort_all(self, failures: Iterable[tuple[str, Failure]]) -> list[TokenDelta]:
        return [delta for request_id, failure in failures for delta in self.abort(request_id, failure)]

    @property
    def awaited(self) -> list[Future[Any]]:
        """What requests wait for before they are queued."""
        return self.admission.prerequisites.futures

    def pause(self, request_id: str, paused: bool) -> None:
        """Let a request's sequences make no more tokens for now, or go on; they keep their blocks while all fit."""
        for sequence in self._groups.get(request_id, ()):
            sequence.paused = paused

    def abort(self, request_id: str, failure: Failure | None = None) -> list[TokenDelta]:
        """End all sequences of a request: as failed where ``failure`` is given, else as cancelled.

        Returns the last delta of each that had not ended. An unknown id is one that has ended: nothing happens.
        """
        group = self._groups.get(request_id)
        if not group:
            return []
        sampling = group[0].request.sampling
        unforked = range(len(group), sampling.width)
        alive = [sequence for sequence in group if sequence.state is not State.FINISHED]
        for sequence in alive:
            self._end(sequence)
        self._forget(request_id)
        reason = FinishReason.ERROR if failure else FinishReason.CANCELLED
        return [
            TokenDelta(request_id=request_id, sequence=index, finished=reason, failure=failure)
            for index in (*(sequence.index for sequence in alive), *unforked)
            if index < sampling.told
        ]

    def stop(self, request_id: str, index: int) -> None:
        """End one sequence without a word, as whoever found a stop string in its text has ended it already."""
        for sequence in self._groups.get(request_id, ()):
            if sequence.index == index and sequence.state is not State.FINISHED:
                self._end(sequence)
                self._forget_if_ended(request_id)
                return

    def fail(self, plan: Plan, failure: Failure) -> list[TokenDelta]:
        """End all requests of a step that went wrong; returns their last deltas."""
        for item in plan.items:
            for sequence in {item.sequence, *item.samples}:
                sequence.inflight_steps -= 1
        requests = {item.sequence.request.request_id for item in plan.items}
        deltas = [delta for request_id in requests for delta in self.abort(request_id, failure)]
        self._invalidate_swapped({block for _, block in plan.swap_out})
        for item in plan.items:
            for sequence in (item.sequence, *item.samples):
                self._give_back(sequence)
        return deltas

    def _invalidate_swapped(self, host_blocks: set[int]) -> None:
        """Sequences whose blocks may not have arrived in host memory are computed again."""
        for group in self._groups.values():
            for sequence in group:
                if not host_blocks.isdisjoint(sequence.host_blocks):
                    self.waiting.leave(sequence)
                    self._kv.release_host(sequence)
                    sequence.forget_computed()
                    self.waiting.push(sequence)

    @property
    def paused(self) -> int:
        """Sequences that were preempted and wait to go on."""
        every = (sequence for group in self._groups.values() for sequence in group)
        return sum(one.state in (State.WAITING, State.SWAPPED) and one.cached is not None for one in every)

    @property
    def blocks_reused(self) -> int:
        """Blocks that were found in the prefix cache since the engine started."""
        return self._kv.reused

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._groups)

    def requests(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._groups)

    def adapters(self) -> set[str]:
        """Those of the requests that have not ended."""
        return {group[0].request.adapter for group in self._groups.values()}

    # --- A step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Plan one step. An empty plan: nothing can run before a step under way is collected, or nothing is there."""
        plan, budget, preempted = Plan(), self.options.max_num_batched_tokens, self.preemptions
        self._startable = None
        if self.speculation:
            self.speculation.begin(len(self.running))
        for sequence in self.running.copy():
            if not budget:
                break
            if sequence.state is not State.RUNNING:
                continue  # preempted by one before it
            count = min(self._num_new_tokens(sequence), budget)
            if count and self._make_room(sequence, count, plan):
                self._put(sequence, count, plan)
                budget -= count
        joins = not self.running or self.options.batching_type == "inflight"
        if self.waiting and joins and self.preemptions == preempted:
            self._admit(plan, budget)
        if self.speculation:
            self._draft_tokens(plan)
        return plan

    def update(self, plan: Plan, outcome: StepOutput) -> list[TokenDelta]:
        """Take in the output of the oldest step in flight."""
        self._startable = None
        deltas: list[TokenDelta] = []
        draws = iter(outcome.draws)
        for i, item in enumerate(plan.items):
            first, end = item.sequence, item.start + item.length
            drawn = [next(draws) for _ in item.samples]
            if first.num_draft_tokens and drawn:  # all that was drawn but the last token are accepted drafts
                end += max(len(drawn[0].token_ids), 1) - 1
                first.num_scheduled, first.num_draft_tokens = end, 0
                self._computed(first, item.start, end, drawn[0].token_ids[:-1])
            else:
                self._computed(first, item.start, end)
            if any(draw.failure and draw.failure.code is Code.INTERNAL for draw in drawn):
                self._kv.uncache(first)
            if first.prompt_logprobs is not None:
                first.prompt_logprobs += outcome.prompt_logprobs.get(i, [])
            if first.context_logits is not None and i in outcome.context_logits:
                first.context_logits.append(outcome.context_logits[i])
            if first.pooled and first.state is not State.FINISHED and i in outcome.states:
                deltas += self._finish_if_done(first, pool(first, outcome.states[i]))
            for sequence, draw in zip(item.samples, drawn, strict=True):
                if sequence is not first:
                    self._computed(sequence, end, end)
                sequence.num_pending -= 1
                if sequence.state is State.FINISHED:
                    continue
                deltas += self._search(sequence, draw) if sequence.num_candidates else self._draw(sequence, draw)
        return deltas

    def _draw(self, sequence: Sequence, draw: Draw) -> list[TokenDelta]:
        """Take in what a sequence drew. Its form's parser is another's code, whose errors are this sequence's alone."""
        try:
            delta = append(sequence, draw)
        except Exception:
            logger.exception("request %s cannot go on", sequence.request.request_id)
            delta = failed(sequence, CANNOT_GO_ON)
        return self._finish_if_done(sequence, delta)

    # --- Sequences that run -----------------------------------------------------------------------------------------

    def _num_new_tokens(self, sequence: Sequence) -> int:
        """Tokens the sequence would compute now, had it the step to itself."""
        total = len(sequence.tokens) + sequence.num_pending
        if sequence.paused or sequence.num_draft_tokens:
            return 0
        if sequence.num_pending and (
            total >= sequence.max_len  # the last token is in flight
            or sequence.num_candidates  # beams are ranked only when all have their candidates
            or sequence.guide  # what may come next depends on the token in flight
            or (self.speculation and self.speculation.active)  # and so does a draft
        ):
            return 0
        threshold = self.options.long_prefill_token_threshold
        return min(total - sequence.num_scheduled, threshold or total)

    def _draft_tokens(self, plan: Plan) -> None:
        """Have tokens computed along with the newest ones, in case they are the next: as many as the step has room for
        once all others have theirs, in blocks that nobody has to give up for them."""
        assert self.speculation
        budget = self.options.max_num_batched_tokens - plan.tokens
        for item in plan.items:
            sequence = item.sequence
            if (
                item.samples != (sequence,)
                or sequence.num_pending > 1
                or not sequence.generated
                or sequence.num_candidates
            ):
                continue
            most = min(budget, sequence.max_len - len(sequence.tokens) - 1)
            draft = self.speculation.draft(sequence, most) if most > 0 else []
            missing = self._kv.missing(sequence, len(draft))
            if not draft or missing > self.device.free:
                continue
            if missing:
                plan.copies += self._kv.grow(sequence, missing)
            item.draft.extend(draft)
            sequence.num_draft_tokens = len(draft)
            sequence.num_scheduled += len(draft)
            budget -= len(draft)

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Get blocks for ``count`` more tokens, preempting from the last on. False: not in this step."""
        while (missing := self._kv.missing(sequence, count)) > self.device.free:
            victim = self.running[-1]
            if any(one.inflight_steps for one in self._preemption_group(victim)):
                return False
            self._preempt(victim, plan)
            if sequence.state is not State.RUNNING:
                return False
        if missing:
            plan.copies += self._kv.grow(sequence, missing)
        return True

    def _put(self, sequence: Sequence, count: int, plan: Plan) -> None:
        """Plan ``count`` tokens of a sequence that has blocks for them."""
        start = sequence.num_scheduled
        sequence.num_scheduled += count
        sequence.inflight_steps += 1
        samples: tuple[Sequence, ...] = ()
        if sequence.num_scheduled == len(sequence.tokens) + sequence.num_pending and not sequence.pooled:
            samples = (sequence, *self._fork(sequence))
            for drawing in samples:
                drawing.num_pending += 1
        plan.items.append(Item(sequence, start, count, samples, []))

    def _fork(self, first: Sequence) -> list[Sequence]:
        """The other sequences of a request whose prompt is computed now for the first time."""
        n = first.request.sampling.width
        if n == 1 or len(group := self._groups[first.request.request_id]) == n:
            return []
        search = self._searches.get(first.request.request_id)
        if search and first.guide:
            search.guide = first.guide.copy()
        for index in range(1, n):
            twin = self._kv.fork(first, index)
            twin.num_candidates = first.num_candidates
            twin.inflight_steps = 1
            self._run(twin)
            group.append(twin)
        self._reserved_rows -= n - 1
        return group[1:]

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        sequence.row, sequence.sent_blocks = self._rows.pop(), -1
        bisect.insort(self.running, sequence, key=self.waiting.turn)

    def _num_unforked(self, sequence: Sequence) -> int:
        """Sequences of its request that are still to be forked from it."""
        if sequence.index or sequence.generated:
            return 0
        return sequence.request.sampling.width - len(self._groups[sequence.request.request_id])

    # --- Sequences that stop running --------------------------------------------------------------------------------

    def _computed(self, sequence: Sequence, start: int, end: int, drawn: list[int] | None = None) -> None:
        """Tokens ``start`` to ``end`` are computed, of which the last ones may be ``drawn`` just now."""
        sequence.inflight_steps -= 1
        if sequence.state is State.FINISHED:
            self._give_back(sequence)
            return
        sequence.num_computed = end
        self._kv.keep(sequence, start, end, drawn or [])

    def _finish_if_done(self, sequence: Sequence, delta: TokenDelta | None) -> list[TokenDelta]:
        """What a step brought a sequence, which ends with it where the delta says so."""
        if delta and delta.finished:
            self._end(sequence)
            self._forget_if_ended(sequence.request.request_id)
        return [delta] if delta else []

    def _search(self, sequence: Sequence, draw: Draw) -> list[TokenDelta]:
        """Take in what one beam may go on with; once all have told, the best go on, over the blocks of those they come
        from, or the search is over."""
        if draw.failure:
            return self.abort(sequence.request.request_id, draw.failure)
        request_id = sequence.request.request_id
        search, group = self._searches[request_id], self._groups[request_id]
        assert draw.candidates is not None
        search.tell(sequence.index, draw.candidates)
        if not search.all_told:
            return []
        try:
            chosen = search.choose(group)
        except Exception:
            logger.exception("request %s cannot go on", sequence.request.request_id)
            return self.abort(sequence.request.request_id, CANNOT_GO_ON)
        if chosen is None:
            for one in group:
                self._end(one)
            self._forget(sequence.request.request_id)
            return search.deltas(group)
        rows = [one.row for one in group]
        self._kv.branch(group, [branch.parent for branch in chosen], [branch.token for branch in chosen])
        for one, branch in zip(group, chosen, strict=True):
            one.guide = branch.guide
            self.builder.branch(one.row, rows[branch.parent], len(one.tokens) - 1, branch.token)
        return []

    def _forget_if_ended(self, request_id: str) -> None:
        if all(sequence.state is State.FINISHED for sequence in self._groups[request_id]):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        first, *_ = self._groups.pop(request_id)
        self._searches.pop(request_id, None)
        self.admission.forget(first)

    def _preemption_group(self, sequence: Sequence) -> list[Sequence]:
        """Those that are preempted together: a request's beams, none of which goes on without the others."""
        return self._groups[sequence.request.request_id] if sequence.num_candidates else [sequence]

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        """Take the blocks of the last running sequence; it goes on from a copy in host memory, or from nothing."""
        self.preemptions += 1
        if victim.num_candidates:
            victim = self._begin_anew(victim)
        self._reserved_rows -= self._num_unforked(victim)
        self._leave_running(victim)
        swaps = self.options.preemption_mode == "swap" and not victim.num_candidates
        if swaps and (moved := self._kv.swap_out(victim)):
            plan.swap_out += moved
            victim.state = State.SWAPPED
        else:
            victim.forget_computed()
        self._give_back(victim)
        self.waiting.push(victim)

    def _begin_anew(self, beam: Sequence) -> Sequence:
        """Leave nothing of a search but its first beam before its first token: apart, its beams would share no blocks
        when they are computed again, and not all might find room."""
        group = self._groups[beam.request.request_id]
        first, *others = group
        for other in others:
            self._end(other)
        self._reserved_rows += len(others)
        del group[1:], first.tokens[first.prompt_length :]
        del first.block_hashes[first.prompt_length // self.device.block_size :]
        if others:
            first.guide = self._searches[first.request.request_id].guide
        self._searches[first.request.request_id] = BeamSearch(first)
        return first

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is; its blocks come back once no step under way uses them."""
        self._startable = None
        unqueued = self.admission.leave(sequence)
        if sequence.state is State.RUNNING:
            self._reserved_rows -= self._num_unforked(sequence)
            self._leave_running(sequence)
        elif not unqueued:
            self.waiting.leave(sequence)
            self._kv.release_host(sequence)
        sequence.state = State.FINISHED
        self._give_back(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        del self.running[bisect.bisect_left(self.running, self.waiting.turn(sequence), key=self.waiting.turn)]
        self._kv.unreserve(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Return row and blocks, unless a step under way uses them."""
        if sequence.inflight_steps == 0 and sequence.row >= 0:
            self._rows.append(sequence.row)
            sequence.row = -1
            self._kv.release(sequence)

    # --- Sequences that wait ----------------------------------------------------------------------------------------

    def _admit(self, plan: Plan, budget: int) -> None:
        """Start those who wait, the best first, until one does not fit."""
        options = self.options
        partial = [sequence for sequence in self.running if sequence.is_partial_prefill]
        long = sum(map(self.waiting.is_long, partial))
        while budget:
            sequence = self.waiting.first(with_long=long < options.max_long_partial_prefills)
            if sequence is None or len(self._rows) - self._reserved_rows < 1 + self._num_unforked(sequence):
                return
            place = self._kv.find_cached(sequence)
            remaining = len(sequence.tokens) - place.start
            count = min(remaining, budget, options.long_prefill_token_threshold or budget)
            if count < remaining:
                if not options.enable_chunked_prefill or len(partial) >= options.max_num_partial_prefills:
                    return
                partial.append(sequence)
                long += self.waiting.is_long(sequence)
            if not self._start(sequence, place, count, plan):
                return
            self._put(sequence, count, plan)
            budget -= count

    def _start(self, sequence: Sequence, place: CacheHit, count: int, plan: Plan) -> bool:
        """Run a waiting sequence with ``count`` tokens from ``place`` on. False: its blocks are not there."""
        if not self._kv.take(sequence, place, count, alone=not self.running):
            return False
        self.waiting.leave(sequence)
        if sequence.state is State.SWAPPED:
            plan.swap_in += self._kv.swap_in(sequence)
        if sequence.cached is None:
            sequence.cached = place.start
            sequence.first_scheduled = time.monotonic()
            sequence.queued = sequence.first_scheduled - sequence.arrived
            self.admission.started(sequence)
        sequence.num_computed = sequence.num_scheduled = place.start
        self._reserved_rows += self._num_unforked(sequence)
        self._run(sequence)
        return True
