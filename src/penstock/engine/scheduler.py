"""The scheduler: who runs in the next step, how many tokens each, in which KV blocks.

There are no phases. A step has a budget of tokens, every sequence asks for the tokens it has not computed yet, and
prefill, chunks of it, decoding, cache hits and computing again after preemption are the same thing with other
numbers. Steps may overlap: ``schedule`` can plan the next one before the last is collected, whose token is then
still unknown, and blocks are given back only after the last step that uses them.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.core import Code, EngineRequest, Failure, FinishReason, PenstockError, TokenDelta
from penstock.core.errors import invalid
from penstock.core.options import SchedulerOptions

from . import prefix
from .beams import Beams, Branch
from .blocks import BlockPool
from .guided import Grammar
from .plan import Draw, Item, Outcome, Plan
from .sequence import Sequence, State
from .speculation import Speculation
from .thinking import guide_of
from .waiting import Waiting


class Scheduler:
    """Sequences from arrival to their end.

    Args:
        device: blocks of the KV cache.
        host: blocks of the host tier, where swapped sequences wait; None where there is no such tier.
        weights: names the weights in the prefix cache.

    Raises ``PenstockError`` (``invalid``) where the cache cannot hold a single sequence of ``max_model_len``.
    """

    def __init__(
        self, options: SchedulerOptions, device: BlockPool, host: BlockPool | None = None, weights: str = ""
    ) -> None:
        if device.blocks_for(options.max_model_len) > device.total:
            raise invalid(
                "max_model_len",
                f"{options.max_model_len} tokens do not fit into {device.total} KV blocks of {device.block_size}. "
                "Give the cache more memory, or lower max_model_len.",
                device.total * device.block_size,
            )
        self.options = options
        self.device = device
        self.host = host
        self.weights = weights
        self.waiting = Waiting(options.scheduling_policy == "priority", options.long_prefill_token_threshold)
        self.running: list[Sequence] = []
        """In the order of ``Waiting.place``; the last one is preempted first."""
        self.preemptions = 0
        self.speculation: Speculation | None = None
        """Who guesses tokens ahead."""
        self._never_evicting = options.batch_scheduler_policy == "guaranteed_no_evict"
        self._families: dict[str, list[Sequence]] = {}
        self._compiling: list[tuple[Sequence, Future[Grammar]]] = []
        self._deadlines: list[tuple[float, int, str]] = []
        self._rows = list(range(options.max_num_seqs - 1, -1, -1))
        self._rows_due = 0
        self._reserved = 0
        self._arrivals = 0

    # --- Requests come and go ---------------------------------------------------------------------------------------

    def fitted(self, request: EngineRequest) -> EngineRequest:
        """The request with ``max_tokens`` that the context has room for.

        Raises ``PenstockError`` (``invalid``) where it can never run.
        """
        options, sampling = self.options, request.sampling
        if not request.prompt:
            raise invalid("prompt", "must hold at least one token")
        room = options.max_model_len - len(request.prompt)
        if request.pooling:
            if room < 0:
                most = options.max_model_len
                raise invalid("prompt", f"has {len(request.prompt)} tokens, and at most {most} are taken", most)
            room = 1  # of which nothing is used
        if room < 1:
            most = options.max_model_len - 1
            raise invalid("prompt", f"has {len(request.prompt)} tokens, and at most {most} leave room for one", most)
        if sampling.width > options.max_num_seqs:
            field = "n" if sampling.best_of is None else "best_of"
            raise invalid(field, f"must be at most max_num_seqs ({options.max_num_seqs})", options.max_num_seqs)
        if request.deadline is not None and not math.isfinite(request.deadline):
            raise invalid("deadline", "must be a finite number of seconds")
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
        if sampling.allowed_token_ids and sampling.min_tokens and stops.issuperset(sampling.allowed_token_ids):
            raise invalid("min_tokens", "must be 0 where every allowed token ends the sequence", 0)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        request = msgspec.structs.replace(request, sampling=sampling.replace(max_tokens=max_tokens))
        together = self._never_evicting or sampling.use_beam_search
        if together and self._blocks_to_the_end(request) > self.device.total:
            raise invalid("n", "so many sequences of this length do not fit into the KV cache together")
        return request

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait. What a free row is there for does not count as waiting."""
        return len(self.waiting) < self.options.max_waiting + len(self._rows)

    def add(self, request: EngineRequest, compile_form: Callable[[], Future[Grammar]] | None = None) -> None:
        """Queue a request, which runs once the form that guides it is compiled.

        Raises ``PenstockError``: ``invalid`` where it can never run, ``overloaded`` where the queue is full.
        """
        request = self.fitted(request)
        if request.request_id in self._families:
            raise invalid("request_id", f"{request.request_id!r} is in use")
        if not self.has_room:
            raise PenstockError(
                Code.OVERLOADED, f"{len(self.waiting)} sequences are waiting", "max_waiting", self.options.max_waiting
            )
        seed = random.getrandbits(63) if request.sampling.seed is None else request.sampling.seed
        first = Sequence(request, 0, seed, self._arrivals)
        if request.sampling.use_beam_search:
            first.beams = Beams(first)
        first.guide = guide_of(request, None)
        self._arrivals += 1
        if compile_form:
            self._compiling.append((first, compile_form()))
            self.waiting.expect()
        else:
            self.waiting.push(first)
        self._families[request.request_id] = [first]
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, first.order, request.request_id))

    def let_in(self) -> list[TokenDelta]:
        """Queue those whose form is compiled; returns the last deltas of those whose form is wrong."""
        deltas: list[TokenDelta] = []
        compiling, self._compiling = self._compiling, []
        for sequence, grammar in compiling:
            if sequence.state is State.FINISHED:
                if not any(
                    wanted is grammar for other, wanted in (*compiling, *self._compiling) if other is not sequence
                ):
                    grammar.cancel()  # it has not begun
            elif not grammar.done():
                self._compiling.append((sequence, grammar))
            elif error := grammar.exception():
                failure = error.failure if isinstance(error, PenstockError) else Failure(Code.INTERNAL, str(error))
                deltas += self.abort(sequence.request.request_id, failure)
            else:
                sequence.guide = guide_of(sequence.request, grammar.result())
                self.waiting.push(sequence, expected=True)
        return deltas

    @property
    def compiling(self) -> list[Future[Grammar]]:
        """Forms that requests wait for."""
        return [grammar for _, grammar in self._compiling]

    def expire(self, now: float) -> list[TokenDelta]:
        """End requests whose deadline has passed; ``now`` is on the same clock."""
        deltas: list[TokenDelta] = []
        while self._deadlines:
            deadline, order, request_id = self._deadlines[0]
            family = self._families.get(request_id)
            ended = not family or family[0].order != order
            if not ended and deadline > now:
                break
            heapq.heappop(self._deadlines)
            if not ended:
                deltas += self.abort(request_id, Failure(Code.TIMEOUT, "the deadline has passed"))
        return deltas

    def abort(self, request_id: str, failure: Failure | None = None) -> list[TokenDelta]:
        """End all sequences of a request: as failed where ``failure`` is given, else as cancelled.

        Returns the last delta of each that had not ended. An unknown id is one that has ended: nothing happens.
        """
        family = self._families.get(request_id)
        if not family:
            return []
        sampling = family[0].request.sampling
        unborn = range(len(family), sampling.width)
        alive = [sequence for sequence in family if sequence.state is not State.FINISHED]
        for sequence in alive:
            self._end(sequence)
        del self._families[request_id]
        reason = FinishReason.ERROR if failure else FinishReason.CANCELLED
        return [
            TokenDelta(request_id=request_id, sequence=index, finished=reason, failure=failure)
            for index in (*(sequence.index for sequence in alive), *unborn)
            if index < sampling.told
        ]

    def stop(self, request_id: str, index: int) -> None:
        """End one sequence without a word, as whoever found a stop string in its text has ended it already."""
        for sequence in self._families.get(request_id, ()):
            if sequence.index == index and sequence.state is not State.FINISHED:
                self._end(sequence)
                self._forget_if_ended(request_id)
                return

    def fail(self, plan: Plan, failure: Failure) -> list[TokenDelta]:
        """End all requests of a step that went wrong; returns their last deltas."""
        for item in plan.items:
            for sequence in {item.sequence, *item.samples}:
                sequence.steps_under_way -= 1
        requests = {item.sequence.request.request_id for item in plan.items}
        deltas = [delta for request_id in requests for delta in self.abort(request_id, failure)]
        self._distrust({block for _, block in plan.swap_out})
        for item in plan.items:
            for sequence in (item.sequence, *item.samples):
                self._give_back(sequence)
        return deltas

    def _distrust(self, host_blocks: set[int]) -> None:
        """Sequences whose blocks may not have arrived in host memory are computed again."""
        for family in self._families.values():
            for sequence in family:
                if not host_blocks.isdisjoint(sequence.host_blocks):
                    assert self.host is not None
                    self.host.release(sequence.host_blocks)
                    sequence.host_blocks = []
                    sequence.forget_computed()

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._families)

    def requests(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._families)

    def adapters(self) -> set[str]:
        """Those of the requests that have not ended."""
        return {family[0].request.adapter for family in self._families.values()}

    # --- A step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Plan one step. An empty plan: nothing can run before a step under way is collected, or nothing is there."""
        plan, budget, preempted = Plan(), self.options.max_num_batched_tokens, self.preemptions
        if self.speculation:
            self.speculation.begin(len(self.running))
        for sequence in self.running.copy():
            if not budget:
                break
            if sequence.state is not State.RUNNING:
                continue  # preempted by one before it
            count = min(self._wanted(sequence), budget)
            if count and self._make_room(sequence, count, plan):
                self._put(sequence, count, plan)
                budget -= count
        if self.waiting and self.preemptions == preempted:
            self._admit(plan, budget)
        if self.speculation:
            self._guess(plan)
        return plan

    def update(self, plan: Plan, outcome: Outcome) -> list[TokenDelta]:
        """Take in what the oldest step under way brought."""
        deltas: list[TokenDelta] = []
        draws = iter(outcome.draws)
        for i, item in enumerate(plan.items):
            first, end = item.sequence, item.start + item.length
            drawn = [next(draws) for _ in item.samples]
            if first.guessing and drawn:  # rightly, but for what was drawn last
                end += len(drawn[0].token_ids) - 1
                first.planned, first.guessing = end, 0
                self._computed(first, item.start, end, drawn[0].token_ids[:-1])
            else:
                self._computed(first, item.start, end)
            if first.prompt_logprobs is not None:
                first.prompt_logprobs += outcome.prompt_logprobs.get(i, [])
            if first.pooled and first.state is not State.FINISHED and i in outcome.states:
                deltas += self._pool(first, outcome.states[i])
            for sequence, draw in zip(item.samples, drawn, strict=True):
                if sequence is not first:
                    self._computed(sequence, end, end)
                sequence.pending -= 1
                if sequence.state is not State.FINISHED:
                    deltas += self._search(sequence, draw) if sequence.beams else [self._append(sequence, draw)]
        return deltas

    # --- Sequences that run -----------------------------------------------------------------------------------------

    def _wanted(self, sequence: Sequence) -> int:
        """Tokens the sequence would compute now, had it the step to itself."""
        total = len(sequence.tokens) + sequence.pending
        if sequence.guessing or (sequence.pending and (total >= sequence.longest or sequence.beams)):
            return 0  # nobody knows how far it is, or its last token is being drawn, or who goes on
        threshold = self.options.long_prefill_token_threshold
        return min(total - sequence.planned, threshold or total)

    def _guess(self, plan: Plan) -> None:
        """Have tokens computed along with the newest ones, in case they are the next: as many as the step has room for
        once all others have theirs, in blocks that nobody has to give up for them."""
        assert self.speculation
        budget = self.options.max_num_batched_tokens - plan.tokens
        for item in plan.items:
            sequence = item.sequence
            if item.samples != (sequence,) or sequence.pending > 1 or not sequence.generated or sequence.beams:
                continue
            most = min(budget, sequence.longest - len(sequence.tokens) - 1)
            draft = self.speculation.guess(sequence, most) if most > 0 else []
            missing = self._missing(sequence, len(draft))
            if not draft or missing > self.device.free:
                continue
            if missing:
                self._grow(sequence, missing, plan)
            item.draft.extend(draft)
            sequence.guessing = len(draft)
            sequence.planned += len(draft)
            budget -= len(draft)

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Get blocks for ``count`` more tokens, preempting from the last on. False: not in this step."""
        while (missing := self._missing(sequence, count)) > self.device.free:
            victim = self.running[-1]
            if any(one.steps_under_way for one in self._together(victim)):
                return False
            self._preempt(victim, plan)
            if sequence.state is not State.RUNNING:
                return False
        if missing:
            self._grow(sequence, missing, plan)
        return True

    def _missing(self, sequence: Sequence, count: int) -> int:
        """Blocks to allocate before ``count`` more tokens can be computed."""
        missing = self.device.blocks_for(sequence.planned + count) - len(sequence.blocks)
        return max(missing, 0) + self._writes_shared(sequence)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that others hold, too."""
        block, filled = divmod(sequence.planned, self.device.block_size)
        return bool(filled) and self.device.holders(sequence.blocks[block]) > 1

    def _grow(self, sequence: Sequence, missing: int, plan: Plan) -> None:
        """Allocate the blocks that are missing; a shared one that is written next is replaced by a copy."""
        if sequence.reserved:
            self._reserve(sequence, sequence.reserved - min(missing, sequence.reserved))
        shared = self._writes_shared(sequence)
        blocks = self.device.allocate(missing)
        if shared:
            written = sequence.planned // self.device.block_size
            plan.copies.append((sequence.blocks[written], blocks[0]))
            self.device.release([sequence.blocks[written]])
            sequence.blocks[written] = blocks.pop(0)
        sequence.blocks += blocks

    def _put(self, sequence: Sequence, count: int, plan: Plan) -> None:
        """Plan ``count`` tokens of a sequence that has blocks for them."""
        start = sequence.planned
        sequence.planned += count
        sequence.steps_under_way += 1
        samples: tuple[Sequence, ...] = ()
        if sequence.planned == len(sequence.tokens) + sequence.pending and not sequence.pooled:
            samples = (sequence, *self._fork(sequence))
            for drawing in samples:
                drawing.pending += 1
        plan.items.append(Item(sequence, start, count, samples, []))

    def _fork(self, first: Sequence) -> list[Sequence]:
        """The other sequences of a request whose prompt is computed now for the first time."""
        n = first.request.sampling.width
        if n == 1 or len(family := self._families[first.request.request_id]) == n:
            return []
        shared = first.blocks[: self.device.blocks_for(first.planned)]
        if first.beams and first.guide:
            first.beams.guide = first.guide.copy()
        for index in range(1, n):
            twin = first.fork(index, shared.copy())
            self.device.hold(shared)
            twin.beams = first.beams
            if self._never_evicting:
                own = self.device.blocks_for(first.longest) - first.planned // self.device.block_size
                self._reserve(first, first.reserved - own)
                self._reserve(twin, own)
            twin.steps_under_way = 1
            self._run(twin)
            family.append(twin)
        self._rows_due -= n - 1
        return family[1:]

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        sequence.row = self._rows.pop()
        bisect.insort(self.running, sequence, key=self.waiting.place)

    def _unborn(self, sequence: Sequence) -> int:
        """Sequences of its request that are still to be forked from it."""
        if sequence.index or sequence.generated:
            return 0
        return sequence.request.sampling.width - len(self._families[sequence.request.request_id])

    # --- Sequences that stop running --------------------------------------------------------------------------------

    def _computed(self, sequence: Sequence, start: int, end: int, drawn: list[int] | None = None) -> None:
        """Tokens ``start`` to ``end`` are computed: full blocks can be found by others.

        Args:
            drawn: tokens that it is about to get, which may be among them.
        """
        sequence.steps_under_way -= 1
        if sequence.state is State.FINISHED:
            self._give_back(sequence)
            return
        sequence.computed = end
        size = self.device.block_size
        if self.options.enable_prefix_caching and start // size < end // size:
            self._name_blocks(sequence, drawn)
            for full in range(start // size, end // size):
                self.device.cache(sequence.blocks[full], sequence.chain[full])

    def _append(self, sequence: Sequence, draw: Draw) -> TokenDelta:
        """Append what was drawn and end the sequence where it is time."""
        finished, stop_token, failure = None, None, None
        guide, token_ids = sequence.guide, draw.token_ids
        for i, token in enumerate(token_ids, 1):
            if guide and token in sequence.request.eos_token_ids:
                token = token_ids[i - 1] = guide.for_end(token)
                if draw.logprobs:  # which stay those of what was drawn
                    draw.logprobs[i - 1][0] = msgspec.structs.replace(draw.logprobs[i - 1][0], token_id=token)
            sequence.tokens.append(token)
            if guide and (failure := guide.failure):
                finished = FinishReason.ERROR
            elif token in sequence.stops and sequence.generated > sequence.request.sampling.min_tokens:
                finished, stop_token = FinishReason.STOP, token
            elif guide and not guide.take(token):
                finished, failure = FinishReason.ERROR, guide.failure
            elif guide and guide.complete:
                finished = FinishReason.STOP
            elif len(sequence.tokens) >= sequence.longest:
                finished = FinishReason.LENGTH
            elif guide and i == len(token_ids) and self._may_jump(sequence):
                token_ids += guide.forced()
            if finished:
                del token_ids[i:]
        if draw.logprobs:
            del draw.logprobs[len(token_ids) :]
        delta = TokenDelta(
            request_id=sequence.request.request_id,
            sequence=sequence.index,
            token_ids=token_ids,
            logprobs=draw.logprobs,
            prompt_logprobs=sequence.prompt_logprobs,
            finished=finished,
            failure=failure,
            stop_token=stop_token,
            cached_tokens=sequence.cached or 0,
            queued=sequence.queued,
        )
        sequence.prompt_logprobs = None
        sequence.queued = 0.0
        if finished:
            self._end(sequence)
            self._forget_if_ended(sequence.request.request_id)
        return delta

    def _search(self, sequence: Sequence, draw: Draw) -> list[TokenDelta]:
        """Take in what one beam may go on with; once all have told, the best go on, over the blocks of those they come
        from, or the search is over."""
        beams, family = sequence.beams, self._families[sequence.request.request_id]
        assert beams is not None and draw.candidates is not None
        beams.tell(sequence.index, draw.candidates)
        if not beams.all_told:
            return []
        if (chosen := beams.choose(family)) is None:
            for one in family:
                self._end(one)
            del self._families[sequence.request.request_id]
            return beams.deltas(family[0])
        self._branch(family, chosen)
        return []

    def _branch(self, family: list[Sequence], chosen: list[Branch]) -> None:
        """Let beams go on from others' tokens, over the same blocks."""
        old = [(one.tokens, one.blocks, one.chain) for one in family]
        for one, branch in zip(family, chosen, strict=True):
            tokens, blocks, chain = old[branch.parent]
            shared = blocks[: self.device.blocks_for(one.planned)]
            self.device.hold(shared)
            one.tokens, one.blocks, one.chain = [*tokens, branch.token], shared, chain.copy()
            one.guide = branch.guide
        for one, (_, blocks, _) in zip(family, old, strict=True):
            self.device.release(blocks)
            if self._never_evicting:
                self._reserve(one, self.device.blocks_for(one.longest) - one.planned // self.device.block_size)

    def _pool(self, sequence: Sequence, states: np.ndarray) -> list[TokenDelta]:
        """Take in hidden states that a vector is made of; when they are all there, it is the sequence's end."""
        assert sequence.pooled is not None
        sequence.pooled.add(states)
        if sequence.computed < sequence.prompt_length:
            return []
        request_id = sequence.request.request_id
        self._end(sequence)
        self._forget_if_ended(request_id)
        return [
            TokenDelta(
                request_id=request_id,
                embedding=sequence.pooled.vector(),
                finished=FinishReason.STOP,
                cached_tokens=sequence.cached or 0,
                queued=sequence.queued,
            )
        ]

    def _may_jump(self, sequence: Sequence) -> bool:
        """Whether tokens that alone can come may be appended: nobody waits for what is known of each."""
        sampling = sequence.request.sampling
        return not sequence.pending and sampling.logprobs is None and not sampling.stop

    def _forget_if_ended(self, request_id: str) -> None:
        if all(sequence.state is State.FINISHED for sequence in self._families[request_id]):
            del self._families[request_id]

    def _together(self, sequence: Sequence) -> list[Sequence]:
        """Those that are preempted together: a request's beams, none of which goes on without the others."""
        return self._families[sequence.request.request_id] if sequence.beams else [sequence]

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        """Take the blocks of the last running sequence; it goes on from a copy in host memory, or from nothing."""
        self.preemptions += 1
        if victim.beams:
            victim = self._begin_anew(victim)
        self._rows_due -= self._unborn(victim)
        self._leave_running(victim)
        swaps = self.options.preemption_mode == "swap" and not victim.beams
        if swaps and self.host and len(victim.blocks) <= self.host.free:
            victim.host_blocks = self.host.allocate(len(victim.blocks))
            plan.swap_out += zip(victim.blocks, victim.host_blocks, strict=True)
            victim.state = State.SWAPPED
        else:
            victim.forget_computed()
        self._give_back(victim)
        self.waiting.push(victim)

    def _begin_anew(self, beam: Sequence) -> Sequence:
        """Leave nothing of a search but its first beam before its first token: apart, its beams would share no blocks
        when they are computed again, and not all might find room."""
        family = self._families[beam.request.request_id]
        first, *others = family
        for other in others:
            self._end(other)
        self._rows_due += len(others)
        del family[1:], first.tokens[first.prompt_length :]
        del first.chain[first.prompt_length // self.device.block_size :]
        assert first.beams
        if others:
            first.guide = first.beams.guide
        first.beams = Beams(first)
        return first

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is; its blocks come back once no step under way uses them."""
        if sequence.state is State.RUNNING:
            self._rows_due -= self._unborn(sequence)
            self._leave_running(sequence)
        else:
            self.waiting.leave()
            if self.host:
                self.host.release(sequence.host_blocks)
        sequence.host_blocks = []
        sequence.state = State.FINISHED
        self._give_back(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        del self.running[bisect.bisect_left(self.running, self.waiting.place(sequence), key=self.waiting.place)]
        self._reserve(sequence, 0)

    def _give_back(self, sequence: Sequence) -> None:
        """Return row and blocks, unless a step under way uses them."""
        if sequence.steps_under_way == 0 and sequence.row >= 0:
            self._rows.append(sequence.row)
            sequence.row = -1
            self.device.release(sequence.blocks)
            sequence.blocks = []

    # --- Sequences that wait ----------------------------------------------------------------------------------------

    def _admit(self, plan: Plan, budget: int) -> None:
        """Start those who wait, the best first, until one does not fit."""
        options = self.options
        partial = [sequence for sequence in self.running if sequence.halfway]
        long = sum(map(self.waiting.is_long, partial))
        while budget:
            sequence = self.waiting.first(with_long=long < options.max_long_partial_prefills)
            if sequence is None or len(self._rows) - self._rows_due < 1 + self._unborn(sequence):
                return
            place = self._place_for(sequence)
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

    def _place_for(self, sequence: Sequence) -> Place:
        """Where a waiting sequence can go on."""
        if sequence.state is State.SWAPPED:
            return Place(sequence.computed, [])
        if not self.options.enable_prefix_caching or sequence.wants_all:
            return Place(0, [])
        self._name_blocks(sequence)
        size = self.device.block_size
        hits = self.device.cached(sequence.chain[: (len(sequence.tokens) - 1) // size])  # one token is left to compute
        return Place(len(hits) * size, hits)

    def _start(self, sequence: Sequence, place: Place, count: int, plan: Plan) -> bool:
        """Run a waiting sequence with ``count`` tokens from ``place`` on. False: its blocks are not there."""
        device, options = self.device, self.options
        needed = max(device.blocks_for(place.start + count), len(sequence.host_blocks))
        if not sequence.generated:
            needed = max(needed, min(needed + options.static_decode_blocks, device.blocks_for(sequence.longest)))
        taken = needed - len(place.hits) + device.free_among(place.hits)
        later = max(self._blocks_to_the_end(sequence.request) - needed, 0) if self._never_evicting else 0
        if taken + later > device.free - self._reserved:
            return False
        if self.running and device.used + taken > options.kv_cache_ratio * device.total:
            return False
        device.hold(place.hits)
        sequence.blocks = place.hits + device.allocate(needed - len(place.hits))
        if sequence.state is State.SWAPPED:
            assert self.host is not None
            plan.swap_in += zip(sequence.host_blocks, sequence.blocks, strict=False)
            self.host.release(sequence.host_blocks)
            sequence.host_blocks = []
        if sequence.cached is None:
            sequence.cached = place.start
            sequence.queued = time.monotonic() - sequence.arrived
        sequence.computed = sequence.planned = place.start
        self._reserve(sequence, later)
        self.waiting.leave()
        self._rows_due += self._unborn(sequence)
        self._run(sequence)
        return True

    # --- Blocks -----------------------------------------------------------------------------------------------------

    def _name_blocks(self, sequence: Sequence, drawn: list[int] | None = None) -> None:
        """Name the full blocks of its tokens for the prefix cache, and of those that it is about to get."""
        request = sequence.request
        start = b"" if sequence.chain else prefix.root(self.weights, request.adapter, request.cache_salt)
        prefix.extend(sequence.chain, start, sequence.tokens + (drawn or []), self.device.block_size)

    def _reserve(self, sequence: Sequence, blocks: int) -> None:
        """Set aside so many blocks for a sequence, in place of what was."""
        self._reserved += blocks - sequence.reserved
        sequence.reserved = blocks

    def _blocks_to_the_end(self, request: EngineRequest) -> int:
        """Blocks that all sequences of a request hold at their longest; what is full of the prompt is shared.

        One more where there are several, since the first to write into the shared rest copies it; beams part and copy
        again and again.
        """
        sampling, max_tokens = request.sampling, 0 if request.pooling else request.sampling.max_tokens
        assert max_tokens is not None
        full = len(request.prompt) // self.device.block_size
        own = self.device.blocks_for(len(request.prompt) + max_tokens) - full
        copies = sampling.width if sampling.use_beam_search else sampling.width > 1
        return full + sampling.width * own + copies


class Place(NamedTuple):
    """Where a waiting sequence goes on: after ``start`` tokens, of which ``hits`` are cached blocks."""

    start: int
    hits: list[int]
