"""The scheduler, tested with a simulated worker that checks the content of every KV slot."""

from __future__ import annotations

import gc
import hashlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from itertools import chain, islice
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.options import SchedulerOptions
from penstock.core import (
    Code,
    EngineRequest,
    Failure,
    FinishReason,
    PenstockError,
    PoolingParams,
    SamplingParams,
    TokenDelta,
)
from penstock.engine.kv.block_pool import BlockPool
from penstock.engine.kv.host_tier import HostTier
from penstock.engine.kv.offloading import KVOffloading
from penstock.engine.kv.swap_space import SwapSpace
from penstock.engine.scheduling.prerequisites import Prerequisite
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step_builder import add_drafts
from penstock.engine.sequence.draft_state import DraftState, Proposal
from penstock.engine.sequence.plan import Plan
from penstock.engine.sequence.sequence import Sequence
from penstock.engine.spec_decode.speculation import Speculation
from penstock.engine.step import Candidates, NewRow, RowUpdates, SampledTokens, StepInput, StepOutput, decoder, encoder

EOS = 0
VOCABULARY = 40


def next_token(tokens: list[int], seed: int, index: int) -> int:
    """Return the token that the simulated model samples, a function of all previous tokens, seed and index."""
    digest = hashlib.blake2b(array("q", [seed, index, *tokens]).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def next_beams(tokens: list[int], keep: int) -> Candidates:
    """Return candidate tokens of a beam with their logprobs, a function of all previous tokens."""
    found = {next_token(tokens, -1, i): -(i + next_token(tokens, -2, i) / VOCABULARY) for i in range(keep)}
    return Candidates(np.array(list(found)), np.array(list(found.values()), np.float32))


def expected_outputs(request: EngineRequest, longest: int) -> list[tuple[list[int], FinishReason]]:
    """Return the tokens and finish reason that each sequence of a request must get in any batch."""
    if request.pooling:
        return [([], FinishReason.STOP)]
    results, sampling = [], request.sampling
    if sampling.use_beam_search:
        engine = scheduler(max_model_len=longest)
        engine.add(request)
        deltas = [delta for step in serve(engine, Machine()) for delta in step]
        return [(delta.token_ids, delta.finished or FinishReason.ERROR) for delta in deltas]
    for index in range(sampling.n):
        tokens, finished = list(request.prompt), FinishReason.LENGTH
        while len(tokens) < min(longest, len(request.prompt) + (sampling.max_tokens or longest)):
            tokens.append(next_token(tokens, sampling.seed or 0, index))
            if tokens[-1] == EOS and not sampling.ignore_eos:
                finished = FinishReason.STOP
                break
        results.append((tokens[len(request.prompt) :], finished))
    return results


class Machine:
    """Simulated worker. It computes steps from their messages only, and each of its KV slots remembers the tokens up to
    its position. It checks that slots are written before they are read, and that its state equals the scheduler's.

    Args:
        samples: False for the first pipeline stage, which does not get the tokens sampled by the last stage.
    """

    def __init__(self, samples: bool = True) -> None:
        self.samples = samples
        self.device: dict[int, tuple[int, ...]] = {}
        self.host: dict[int, tuple[int, ...]] = {}
        self.tier: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, NewRow] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.in_use: dict[int, list[int]] = {}
        self.slots_in_use: dict[int, set[int]] = {}

    def apply(self, updates: RowUpdates) -> None:
        for block, slot in updates.stores.reshape(-1, 2).tolist():
            self.tier[slot] = self.device[block]
            assert len(self.tier[slot]) == SIZE, "a partial block was stored"
        for source, target in updates.swap_out.reshape(-1, 2).tolist():
            self.host[target] = self.device.get(source, ())
        for source, target in updates.swap_in.reshape(-1, 2).tolist():
            self.device[target] = self.host[source]
        for source, target in updates.copies.reshape(-1, 2).tolist():
            self.device[target] = self.device[source]
        for slot, block in updates.loads.reshape(-1, 2).tolist():
            self.device[block] = self.tier[slot]
        before, tables = {row: [*known] for row, known in self.tokens.items()}, {**self.tables}
        for row, parent, position, token in updates.beam_steps.reshape(-1, 4).tolist():
            self.tokens[row], self.tables[row] = [*before[parent][:position], token], [*tables[parent]]
        for new in updates.new:
            self.rows[new.row], self.tokens[new.row], self.tables[new.row] = new, new.token_ids.tolist(), []
        for row, first, values in updates.segments(updates.tokens):
            self.tokens[row][first:] = values.tolist()
        for row, first, values in updates.segments(updates.tables):
            self.tables[row][first : first + len(values)] = values.tolist()
        for row, parent, index in updates.forks.reshape(-1, 3).tolist():
            self.rows[row] = msgspec.structs.replace(self.rows[parent], row=row, index=index)
            self.tokens[row], self.tables[row] = [*self.tokens[parent]], [*self.tables[parent]]

    def run(self, scheduler: Scheduler, plan: Plan) -> StepOutput:
        message = scheduler.builder.build(plan)
        add_drafts(message, plan)
        step = decoder(StepInput).decode(encoder.encode(message))
        self.apply(step.updates)
        self.in_use[id(plan)] = [block for item in plan.scheduled for block in item.sequence.blocks]
        self.slots_in_use[id(plan)] = {transfer.slot for transfer in (*plan.stores, *plan.loads)}
        forks: dict[int, list[int]] = {}
        for row, parent, _ in step.updates.forks.reshape(-1, 3).tolist():
            forks.setdefault(parent, []).append(row)
        drafts = iter(step.draft_token_ids.tolist())
        counts = step.drafts.tolist() if len(step.drafts) else [0] * len(step.rows)
        items = zip(
            step.rows.tolist(), step.starts.tolist(), step.lengths.tolist(), step.needs_sample, counts, strict=True
        )
        sampled: list[SampledTokens] = []
        states: dict[int, np.ndarray] = {}
        for i, (row, start, count, samples, drafted) in enumerate(items):
            draft, known, blocks, end = list(islice(drafts, drafted)), self.tokens[row], self.tables[row], start + count
            sequence = plan.scheduled[i].sequence
            assert known[: len(sequence.tokens)] == sequence.tokens, "the worker's tokens differ from the scheduler's"
            assert blocks[: len(sequence.blocks)] == sequence.blocks, "the worker's blocks differ from the scheduler's"
            assert not drafted or len(known) == end
            for position in range(start, end + drafted):
                block, slot = blocks[position // SIZE], position % SIZE
                self.device[block] = (*self.device.get(block, ())[:slot], (known + draft)[position])
            read = [t for block in sequence.blocks for t in self.device.get(block, ())[:SIZE]]
            assert read[:end] == known[:end], "a slot has another token than the sequence"
            new = self.rows[row]
            if new.pooling == "mean" or (new.pooling and end == new.prompt_length):
                first = start if new.pooling == "mean" else end - 1
                states[i] = np.array(known[first:end], np.float32)[:, None]
            for target in (row, *forks.get(row, ())) if samples else ():
                new, known = self.rows[target], self.tokens[target]
                assert len(known) == end
                if new.num_candidates:
                    sampled.append(SampledTokens([], candidates=next_beams(known, new.num_candidates)))
                    continue
                tokens = [next_token(known, new.seed, new.index)]
                for token in draft:
                    if token != tokens[-1]:
                        break
                    tokens.append(next_token(known + tokens, new.seed, new.index))
                known += tokens if self.samples else tokens[:-1]
                sampled.append(SampledTokens(tokens))
        output: StepOutput = decoder(StepOutput).decode(
            encoder.encode(StepOutput(sampled, pooler_hidden_states=states))
        )
        return output

    def check_blocks_in_use(self, plan: Plan, pool: BlockPool) -> None:
        assert all(map(pool.ref_count, self.in_use.pop(id(plan)))), "a block was freed during a step that uses it"
        del self.slots_in_use[id(plan)]


class RandomDrafter:
    """Drafter that proposes correct next tokens and random tokens."""

    rates = (0.7,)

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def propose(self, sequence: Sequence, state: DraftState) -> Proposal:
        return self._proposal(sequence, [], 1)

    def extend(self, sequence: Sequence, state: DraftState, max_len: int) -> Proposal:
        return self._proposal(sequence, state.proposal.token_ids, max_len)

    def remember(self, sequence: Sequence) -> None:
        pass

    def _proposal(self, sequence: Sequence, first: list[int], max_len: int) -> Proposal:
        draft = [*first]
        while len(draft) < max_len and self._rng.random() < 0.9:
            right = next_token(sequence.tokens + draft, sequence.seed, sequence.index)
            draft.append(right if self._rng.random() < 0.7 else self._rng.randrange(VOCABULARY))
        return Proposal(draft, [0] * len(draft))


FAILED = Failure(Code.INTERNAL, "the step failed")


def serve(
    scheduler: Scheduler, machine: Machine, depth: int = 1, fails: Callable[[], bool] = lambda: False
) -> Iterator[list[TokenDelta]]:
    """Run steps until no request is left, with up to ``depth`` of them in flight; yield the deltas of each step. A step
    fails if ``fails`` returns True before it is sent or when it is collected."""
    in_flight, offloading = deque[tuple[Plan, StepOutput]](), scheduler.kv.offloading
    while scheduler.num_unfinished_requests or in_flight or (offloading and offloading.has_stores):
        plan = scheduler.schedule() if len(in_flight) < depth else Plan()
        if plan:
            check_limits(scheduler, plan)
            if fails():
                scheduler.builder.build(plan)
                yield scheduler.fail(plan, FAILED)
                continue
            in_flight.append((plan, machine.run(scheduler, plan)))
        elif in_flight or scheduler.num_unfinished_requests:
            assert in_flight, "unfinished requests, but no step can be planned or collected"
            plan, outcome = in_flight.popleft()
            machine.check_blocks_in_use(plan, scheduler.device_pool)
            if fails():
                yield scheduler.fail(plan, FAILED)
                continue
            if scheduler.speculation:
                scheduler.speculation.record_step(plan, outcome, 0.001 * plan.tokens)
            yield scheduler.update(plan, outcome)


def check_limits(scheduler: Scheduler, plan: Plan) -> None:
    options = scheduler.options
    assert all(item.length for item in plan.scheduled)
    assert plan.tokens <= options.max_num_batched_tokens
    assert len(scheduler.running) <= options.max_num_seqs
    rows = Counter(sequence.row for sequence in scheduler.running)
    assert all(0 <= row < options.max_num_seqs and count == 1 for row, count in rows.items())
    is_partial_prefill = [item for item in plan.scheduled if item.start + item.length < item.sequence.prompt_length]
    assert options.enable_chunked_prefill or not is_partial_prefill
    threshold = options.long_prefill_token_threshold
    assert not threshold or all(item.length <= threshold for item in plan.scheduled)


LONGEST, SIZE = 48, 4


def draw_request(rng: Random, number: int) -> EngineRequest:
    repeating, pooled = rng.random() < 0.5, rng.random() < 0.2
    search = {"temperature": 0, "use_beam_search": True, "best_of": 3} if rng.random() < 0.2 and not pooled else {}
    return EngineRequest(
        request_id=str(number),
        prompt=[1 + (i if repeating else 0) % 7 for i in range(rng.randint(1, 30))],
        sampling=SamplingParams(
            n=1 if pooled else rng.choice((1, 1, 1, 2, 3)),
            seed=rng.randint(0, 3),
            max_tokens=rng.choice((None, rng.randint(1, 24))),
            ignore_eos=rng.random() < 0.5,
            **search,
        ),
        pooling=PoolingParams(pooling_type=rng.choice(("last", "mean")), normalize=False) if pooled else None,
        eos_token_ids=(EOS,),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice(("", "mine")),
    )


def draw_scheduler(rng: Random, stages: int, depth: int) -> tuple[Scheduler, HostTier | None]:
    chunked, partial = rng.random() < 0.7, rng.randint(1, 3)
    options = SchedulerOptions(
        max_num_seqs=rng.randint(3, 8),
        max_num_batched_tokens=rng.randint(1, 40) if chunked else rng.randint(LONGEST, 2 * LONGEST),
        max_model_len=LONGEST,
        scheduling_policy=rng.choice(("fcfs", "priority")),
        batch_scheduler_policy=rng.choice(("max_utilization", "max_utilization", "guaranteed_no_evict")),
        batching_type=rng.choice(("inflight", "inflight", "static")),
        preemption_mode=rng.choice(("recompute", "swap")),
        enable_prefix_caching=rng.random() < 0.5,
        enable_chunked_prefill=chunked,
        max_num_partial_prefills=partial,
        max_long_partial_prefills=rng.randint(1, partial),
        long_prefill_token_threshold=rng.choice((0, 5, 12)) if chunked else 0,
        kv_cache_ratio=rng.choice((0.5, 1.0)),
        static_decode_blocks=rng.randint(0, 3),
    )
    blocks = rng.randint(LONGEST // SIZE, 4 * LONGEST // SIZE)
    pools = BlockPool(blocks, SIZE), SwapSpace(rng.randint(0, 20), SIZE)
    tier = HostTier(rng.randint(1, 60), 1, SIZE) if options.enable_prefix_caching and rng.random() < 0.7 else None
    offloading = KVOffloading(pools[0], tier) if tier else None
    scheduler = Scheduler(options, *pools, pipeline_stages=stages, max_concurrent_batches=depth, offloading=offloading)
    if rng.random() < 0.5:
        scheduler.speculation = Speculation(RandomDrafter(rng), rng.randint(1, 4), adaptive=rng.random() < 0.5)
    return scheduler, tier


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_results_are_the_same_under_any_schedule(seed: int) -> None:
    """Options, arrivals, cancellations, failing steps and overlap are random. At the end, all blocks are free."""
    rng = Random(seed)
    stages, depth = rng.choice((1, 1, 2, 3)), rng.randint(1, 3)
    scheduler, tier = draw_scheduler(rng, stages, depth)
    machine = Machine(samples=stages == 1)
    failing = rng.choice((0.0, 0.05))
    arriving = [draw_request(rng, number) for number in range(rng.randint(1, 12))]
    submitted: dict[str, EngineRequest] = {}

    def arrive() -> None:
        for _ in range(rng.randint(0, len(arriving))):
            request = arriving.pop()
            try:
                scheduler.add(request)
                submitted[request.request_id] = request
            except PenstockError as error:
                assert error.failure.field == "n"  # the KV cache cannot hold all sequences of the request

    received: dict[tuple[str, int], list[TokenDelta]] = {}
    cancelled = set()
    arrive()
    while scheduler.num_unfinished_requests or arriving:
        for deltas in serve(scheduler, machine, depth, lambda: rng.random() < failing):
            if submitted and rng.random() < 0.1:
                cancelled.add(request_id := rng.choice(sorted(submitted)))
                deltas = deltas + scheduler.abort(request_id)
            for delta in deltas:
                received.setdefault((delta.request_id, delta.sequence), []).append(delta)
            if rng.random() < 0.3:
                arrive()
            if tier and rng.random() < 0.2:  # the thread that reads from disk may do this at any time
                slots = tier.allocate(rng.choice((2, 2, 2, tier.num_slots)))
                assert not set(slots).intersection(chain(*machine.slots_in_use.values())), (
                    "a step in flight uses these slots"
                )
                machine.tier.update(dict.fromkeys(slots, (-1,) * SIZE))
                tier.release(slots)
            if tier and rng.random() < 0.15:
                scheduler.device_pool.clear_cache()
        if arriving:
            arrive()

    assert scheduler.device_pool.num_free == scheduler.device_pool.total
    assert scheduler.swap_space is None or scheduler.swap_space.is_free
    assert tier is None or not tier.num_held
    if scheduler.options.batch_scheduler_policy == "guaranteed_no_evict":
        assert scheduler.num_preemptions == 0
    assert bool(scheduler.num_preempted_sequences) == bool(scheduler.num_preemptions)
    assert scheduler.num_preempted_sequences <= sum(request.sampling.num_sequences for request in submitted.values())
    for request in submitted.values():
        for index, (tokens, finished) in enumerate(expected_outputs(request, LONGEST)):
            deltas = received[request.request_id, index]
            out = [token for delta in deltas for token in delta.token_ids]
            ends = [delta.finished for delta in deltas if delta.finished]
            assert len(ends) == 1 and deltas[-1].finished, "each sequence must end once, in its last delta"
            if ends == [FinishReason.CANCELLED]:
                assert request.request_id in cancelled
                assert out == tokens[: len(out)]
            elif deltas[-1].failure:
                assert failing and deltas[-1].failure == FAILED
                assert out == tokens[: len(out)]
            else:
                assert (out, ends) == (tokens, [finished])
                if pooling := request.pooling:
                    pooled = request.prompt if pooling.pooling_type == "mean" else request.prompt[-1:]
                    (vector,) = [delta.embedding for delta in deltas]
                    assert vector == np.float32([sum(pooled) / len(pooled)]).tobytes()


def request(number: int, prompt: int | list[int], **sampling: object) -> EngineRequest:
    tokens = [1] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "seed": 0} | sampling)
    return EngineRequest(request_id=str(number), prompt=tokens, sampling=params)


def scheduler(blocks: int = 64, **options: object) -> Scheduler:
    return Scheduler(SchedulerOptions(**{"max_model_len": LONGEST} | options), BlockPool(blocks, SIZE))


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, 16), ({"cache_salt": "mine"}, 0), ({"adapter": "one"}, 0), ({"prompt": [*range(20)]}, 16)],
)
def test_cached_prefix_is_reused(changes: dict[str, Any], found: int) -> None:
    """A prefix is not shared between salts or adapters. At least one token of the prompt is always computed."""
    engine, machine = scheduler(), Machine()
    engine.add(request(0, [*range(20)]))
    list(serve(engine, machine))
    engine.add(msgspec.structs.replace(request(1, [*range(18), 99, 98]), **changes))
    first = next(serve(engine, machine))
    assert [delta.cached_tokens for delta in first] == [found]


@pytest.mark.parametrize(
    ("depth", "prompts", "options", "last"),
    [
        (2, (3, 3, 3, 3), {}, "0123"),
        (1, (3, 3, 3, 3), {}, "0123"),
        (2, (40, 3), {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 4}, "0000"),
    ],
    ids=["two-steps", "one-step", "long-prompt"],
)
def test_pipeline_steps_run_all_sequences_in_turn(
    depth: int, prompts: tuple[int, ...], options: dict[str, Any], last: str
) -> None:
    """The steps in flight divide the sequences among them. A long prompt is part of every step."""
    limits = SchedulerOptions(max_model_len=LONGEST, **options)
    engine = Scheduler(limits, BlockPool(64, SIZE), pipeline_stages=2, max_concurrent_batches=depth)
    for number, prompt in enumerate(prompts):
        engine.add(request(number, prompt))
    steps = serve(engine, Machine(samples=False), depth)
    assert "".join(delta.request_id for deltas in steps for delta in deltas).endswith(last)


def test_no_request_joins_a_static_batch() -> None:
    """The later request runs after all requests of the batch have ended, although one of them ends early."""
    engine, machine = scheduler(batching_type="static"), Machine()
    for number, tokens in enumerate((2, 6)):
        engine.add(request(number, 4, max_tokens=tokens))
    steps = []
    for deltas in serve(engine, machine):
        if not steps:
            engine.add(request(2, 4, max_tokens=1))
        steps.append({delta.request_id for delta in deltas})
    assert steps == [{"0", "1"}] * 2 + [{"1"}] * 4 + [{"2"}]


def test_short_prompt_overtakes_long_prompts() -> None:
    engine = scheduler(
        max_num_batched_tokens=16,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=8,
    )
    for number, prompt in enumerate((40, 40, 4)):
        engine.add(request(number, prompt))
    assert [item.sequence.request.request_id for item in engine.schedule().scheduled] == ["0", "2"]


def test_length_of_queue_is_limited() -> None:
    engine = scheduler(max_num_seqs=2, max_waiting=3)
    for number in range(5):
        engine.add(request(number, 4))
    with pytest.raises(PenstockError) as refused:
        engine.add(request(5, 4))
    assert refused.value.failure.retryable
    assert refused.value.failure.limit == 3
    assert sum(len(deltas) for deltas in serve(engine, Machine())) == 20


def accepted(engine: Scheduler, requests: list[EngineRequest]) -> int:
    """Add requests until one is refused; return the number of accepted requests."""
    for number, new in enumerate(requests):
        try:
            engine.add(new)
        except PenstockError as error:
            assert error.failure.retryable
            return number
    return len(requests)


@pytest.mark.parametrize(
    ("options", "sampling", "start"),
    [
        ({}, {}, 2),  # each request takes 10 of the 27 blocks
        ({"max_num_seqs": 4}, {"n": 3}, 1),
        ({"max_num_seqs": 300}, {"n": 3}, 2),
        ({"kv_cache_ratio": 0.5}, {}, 1),
        ({"batch_scheduler_policy": "guaranteed_no_evict"}, {"n": 2, "max_tokens": 8}, 1),
    ],
)
def test_requests_that_can_start_do_not_count_as_waiting(
    options: dict[str, Any], sampling: dict[str, Any], start: int
) -> None:
    """Free rows and KV blocks determine how many requests can start. ``max_waiting`` more requests are accepted."""
    engine = scheduler(blocks=27, max_waiting=16, **{"max_num_seqs": 256} | options)
    requests = [request(number, [number, *range(39)], **sampling) for number in range(300)]
    assert accepted(engine, requests[:100]) == start + 16
    assert len({item.sequence.request.request_id for item in engine.schedule().scheduled}) == start
    assert accepted(engine, requests[100:]) == 0, "the queue must be full after the requests have started"
    assert engine.abort(str(start + 9))
    assert accepted(engine, requests[100:]) == 1


def test_requests_beyond_token_budget_do_not_count_as_waiting() -> None:
    """Requests beyond the token budget of a step can start in the next step."""
    engine = scheduler(max_num_seqs=8, max_waiting=2, max_num_batched_tokens=4)
    assert accepted(engine, [request(number, 4) for number in range(20)]) == 10
    engine.schedule()
    assert accepted(engine, [request(number, 4) for number in range(20, 40)]) == 0
    assert engine.abort("1") and engine.abort("2")
    assert accepted(engine, [request(number, 4) for number in range(20, 40)]) == 2


def count_sequences(requests: Container[str]) -> int:
    gc.collect()
    return sum(type(held) is Sequence and held.request.request_id in requests for held in gc.get_objects())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_aborted_waiting_requests_leave_nothing_in_queue(policy: str) -> None:
    """The requests have deadlines and a maximum queue time, some wait for a grammar, and one request precedes them."""
    engine = scheduler(max_num_seqs=1, max_waiting=10_000, scheduling_policy=policy, max_queue_time=60)
    engine.add(request(0, 5, max_tokens=40))
    running = engine.schedule()
    engine.add(request(1, 5))
    grammar: Future[Any] = Future()

    def unused(sequence: Sequence, result: Any) -> None:
        raise AssertionError("a grammar that is never compiled was used")

    names = {f"{policy} {number}": number for number in range(2, 2002)}  # no other test uses these request ids
    for name, number in names.items():
        other = msgspec.structs.replace(request(number, 5), request_id=name, priority=number % 3, deadline=1e9)
        engine.add(other, (lambda: [Prerequisite(grammar, unused)]) if number % 5 == 0 else list)
    assert count_sequences(names) == 2000
    for name in names:
        assert engine.abort(name)
    assert count_sequences(names) == 0
    assert engine.request_ids() == ["0", "1"] and engine.admission.num_waiting == 1 and not engine.admission._deadlines
    assert grammar.cancelled() and running


def test_request_waiting_longer_than_max_queue_time_fails() -> None:
    engine = scheduler(max_num_seqs=1, max_queue_time=10, max_waiting=2000)
    engine.add(request(0, 5, max_tokens=40))
    first = engine.schedule()
    for number in range(1, 1001):
        engine.add(request(number, 5))
    assert not engine.abort("none") and engine.abort("500")
    last = max(sequence.arrived for sequence in engine.waiting)
    assert engine.expire(last) == []
    failed = engine.expire(last + 10.001)
    assert [delta.request_id for delta in failed] == [str(number) for number in range(1, 1001) if number != 500]
    for delta in failed:
        assert delta.failure and (delta.failure.code, delta.failure.field) == ("overloaded", "max_queue_time")
    assert engine.request_ids() == ["0"] and first, "the running request must continue"
    engine.add(request(1001, 5))
    assert len(engine.waiting) == 1 and engine.expire(last + 10.001) == []


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(0, []), "prompt"),
        (request(0, LONGEST), "prompt"),
        (request(0, 4, n=9), "n"),
    ],
)
def test_request_that_can_never_run_is_refused(bad: EngineRequest, field: str) -> None:
    engine = scheduler(max_num_seqs=8)
    with pytest.raises(PenstockError) as refused:
        engine.add(bad)
    assert refused.value.failure.field == field
    assert not refused.value.failure.retryable


def test_cache_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(PenstockError, match="max_model_len"):
        scheduler(blocks=LONGEST // SIZE - 1)


def test_evicted_blocks_are_loaded_from_host_memory() -> None:
    """Blocks that a failed step stored or loaded are not used later."""
    pool, tier = BlockPool(14, SIZE), HostTier(40, 1, SIZE)
    engine = Scheduler(SchedulerOptions(max_model_len=LONGEST), pool, offloading=KVOffloading(pool, tier))
    machine = Machine()

    def run(number: int, fails: str = "") -> int:
        """Run a request to its end; return the number of its cached tokens, or -1 if its first step fails."""
        engine.add(request(number, [number % 10, *range(35)], max_tokens=3))
        first = engine.schedule()
        if fails:
            engine.builder.build(first)
            engine.fail(first, FAILED)
            finish(engine, machine)
            return -1
        (delta,) = engine.update(first, machine.run(engine, first))
        finish(engine, machine)
        return delta.cached_tokens

    assert [run(0), run(1), run(10), run(11), run(21)] == [0, 0, 32, 32, 32]
    assert tier.num_cached == 18 and not tier.num_held
    run(0, fails="load")
    assert run(20) == 32
    engine.kv.reset_prefix_cache()
    assert run(30) == 0
    engine.set_weights("other")
    assert [run(40), run(1), run(50)] == [0, 0, 32], "blocks of other weights were used"
    assert pool.num_free == pool.total and not tier.num_held


def finish(engine: Scheduler, machine: Machine) -> dict[str, list[int]]:
    """Run all requests to their end; return the tokens of the first sequence by request id."""
    tokens: dict[str, list[int]] = {}
    for deltas in serve(engine, machine):
        for delta in deltas:
            if delta.sequence == 0:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens


def test_swapped_sequence_waits_for_result_of_its_swap_out() -> None:
    """At depth 2, the device has room for the swapped sequence again before its swap-out step has failed."""
    options = SchedulerOptions(max_model_len=LONGEST, preemption_mode="swap", enable_prefix_caching=False)
    engine, machine = Scheduler(options, BlockPool(14, SIZE), SwapSpace(20, SIZE)), Machine()
    swapped = request(2, 19, max_tokens=12)
    for new in (request(0, 12, max_tokens=8), request(1, 16, max_tokens=20), swapped):
        engine.add(new)
    plan = engine.schedule()
    engine.update(plan, machine.run(engine, plan))
    engine.pause("0", True)
    while not engine.num_preemptions:
        plan = engine.schedule()
        if not engine.num_preemptions:
            engine.update(plan, machine.run(engine, plan))
    assert plan.swap_out and {item.sequence.request.request_id for item in plan.scheduled} == {"1"}
    engine.builder.build(plan)
    engine.pause("1", True)
    engine.abort("0")
    assert not engine.schedule(), "the sequence must not be swapped in before its swap-out has succeeded"
    assert engine.num_swapped == 1
    assert [delta.request_id for delta in engine.fail(plan, FAILED)] == ["1"]
    expected = expected_outputs(swapped, LONGEST)[0][0]
    rest = finish(engine, machine)["2"]
    assert rest == expected[-len(rest) :]
    assert engine.device_pool.num_free == engine.device_pool.total
    assert engine.swap_space and engine.swap_space.is_free


def test_beams_survive_failure_of_a_step_without_them() -> None:
    """Beam states that are unsent when a step without the beams fails are sent with the beams' next step."""
    engine, machine = scheduler(), Machine()
    beams = request(0, 6, max_tokens=10, temperature=0, use_beam_search=True, best_of=3)
    engine.add(beams)
    engine.add(request(1, 6, max_tokens=20))
    for _ in range(3):
        plan = engine.schedule()
        engine.update(plan, machine.run(engine, plan))
    engine.pause("0", True)
    plan = engine.schedule()
    assert {item.sequence.request.request_id for item in plan.scheduled} == {"1"}
    engine.builder.build(plan)
    assert [delta.request_id for delta in engine.fail(plan, FAILED)] == ["1"]
    engine.pause("0", False)
    assert finish(engine, machine)["0"] == expected_outputs(beams, LONGEST)[0][0]
