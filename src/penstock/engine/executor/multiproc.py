"""The executor with a worker in a process of its own, whose crash or hang leaves the engine's process running."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec
import numpy as np

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, PenstockError

from ..step import LoadLoRA, MemoryProfile, ModelInfo, Op, Propose, StepInput, StepOutput, encoder
from ..step_times import FIRST_STEP_TIMEOUT_FACTOR, StepTimes
from .base import StepFailedError, WorkerLostError
from .messages import (
    Call,
    CallReply,
    ExecuteStep,
    Failed,
    FromWorker,
    GrammarBitmask,
    InitCache,
    InitReply,
    Load,
    Profile,
    RankInfo,
    StepReply,
    ToWorker,
)
from .rank_process import RING_BYTES, RankProcess
from .ring import Descriptors, PeerLostError

LOAD_TIMEOUT = 1800.0
"""Seconds that a worker may take to load its model, or an adapter."""
TIMEOUT_FACTOR = 0.9
"""Part of ``engine_iteration_timeout`` after which a worker is killed, so that the engine can name the worker before
the engine is itself killed for not answering."""


class _PendingCall(msgspec.Struct):
    """A call that not all ranks have answered."""

    op: Op
    future: Future[Any]
    ranks: set[int]
    """Ranks that have not answered."""
    answers: list[CallReply]
    """Answers so far; rank 0's is the first where it has come."""


class MultiprocExecutor:
    """A worker process for each rank, connected by shared memory. All get the same messages; the first rank of the
    last pipeline stage answers steps.

    A worker that takes ``engine_iteration_timeout`` longer than its steps should, or ends, is named by
    ``WorkerLostError``, and all workers are killed.

    Args:
        options: of the engine.
        logs: how the workers set up their logs; None leaves logging alone, as in an application's own process.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None) -> None:
        self._options = options
        self._times = StepTimes(FIRST_STEP_TIMEOUT_FACTOR * options.engine_iteration_timeout)
        self._steps: deque[tuple[int, float]] = deque()
        """Number of tokens and time of submission of each step in flight, the oldest first."""
        self._outputs: deque[StepReply] = deque()
        self._calls: dict[int, _PendingCall] = {}
        """Calls that not all ranks have answered, by number."""
        self._num_calls = 0
        self._last_collected = 0.0
        """Time when a step was last collected."""
        self._num_abandoned = 0
        """Steps in flight whose outputs are to be dropped, as their ``collect`` was interrupted."""
        self._size, self._stages = options.tensor_parallel_size, options.pipeline_parallel_size
        self._memory: int | None = None
        if (world := self._size * self._stages) > 1:
            from penstock.ops.cores import cores_of_rank  # these bring PyTorch
            from penstock.parallel.shared_memory import create_memory

            for rank in range(world):
                cores_of_rank(options.cpu_binding, rank, world)  # refused here, with one sentence
            self._memory = create_memory(self._stages)
        ended = select.epoll()
        rings = [
            [Descriptors.create(RING_BYTES) if 0 < stage < self._stages else None for _ in range(self._size)]
            for stage in range(self._stages + 1)
        ]
        """To each rank of each stage from the stage before; none at the pipeline's ends."""
        self._ranks: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, _shut_down_workers, self._ranks, ended, self._memory, os.getpid())
        """Ends the workers; called by ``close``, and when this object is garbage-collected."""
        try:
            for stage in range(self._stages):
                for rank in range(self._size):
                    info = RankInfo(rank, self._size, stage, self._stages)
                    own = rings[stage][rank], rings[stage + 1][rank]
                    self._ranks.append(RankProcess(options, logs, info, self._memory, ended, *own))
        except BaseException:
            self.close()
            raise
        finally:
            for ring in [ring for stage_rings in rings for ring in stage_rings if ring]:
                ring.close()  # the workers have them
        self._last_stage = self._ranks[-self._size]
        """Its first rank, which replies to steps."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [rank.pid for rank in self._ranks]

    def load(self) -> ModelInfo:
        infos = [reply.info for reply in self._init_request(Load())]
        info = infos[0]
        assert info is not None
        for rank, other in enumerate(infos):
            if other != info:
                self.close()
                words = f"rank {rank} has loaded another model than rank 0, or computes otherwise: {other}, {info}"
                raise PenstockError(Code.INTERNAL, words)
        return info

    def profile(self) -> MemoryProfile:
        profiles = [reply.profile for reply in self._init_request(Profile())]
        return _smallest([profile for profile in profiles if profile])

    def init_cache(self, blocks: int, host_blocks: int) -> None:
        self._init_request(InitCache(blocks, host_blocks))

    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> None:
        tokens = int(step.lengths.sum()) + len(step.draft_token_ids)
        self._send(ExecuteStep(step))
        self._steps.append((tokens, time.monotonic()))
        if step.has_grammar_bitmask:
            assert grammar_bitmask is not None
            try:
                bits = grammar_bitmask.result()
            except BaseException:  # the workers would wait for the bitmask forever
                self._kill()
                raise
            self._send(GrammarBitmask(bits))

    def collect(self) -> StepOutput:
        try:
            while not self._outputs:
                self._receive(self._last_stage, self._deadline(self._tokens))
        except KeyboardInterrupt:  # the caller abandons the step, whose output comes all the same
            self._steps.popleft()
            self._num_abandoned += 1
            raise
        tokens, submitted = self._steps.popleft()
        now = time.monotonic()
        self._times.add(tokens, now - max(submitted, self._last_collected))
        self._last_collected = now
        computed = self._outputs.popleft()
        if computed.failed:
            raise _error(computed.failed)
        assert computed.output is not None
        return computed.output

    def call(self, op: Op) -> Future[Any]:
        self._num_calls += 1
        future: Future[Any] = Future()
        self._calls[self._num_calls] = _PendingCall(op, future, {rank.rank for rank in self._ranks}, [])
        self._send(Call(self._num_calls, op))
        return future

    def wait(self, future: Future[Any]) -> None:
        pending = next((call for call in self._calls.values() if call.future is future), None)
        if pending is None:
            return
        reads = isinstance(pending.op, LoadLoRA)
        tokens = self._tokens + self._options.max_num_batched_tokens
        deadline = time.monotonic() + LOAD_TIMEOUT if reads else self._deadline(tokens)
        while pending.ranks:
            self._receive(self._ranks[min(pending.ranks)], deadline)

    def poll(self) -> None:
        for rank in self._ranks:
            while rank.has_message():
                self._receive(rank, self._deadline(self._tokens))

    def close(self) -> None:
        self._finalizer()

    # --- Messages ---------------------------------------------------------------------------------------------------

    def _init_request(self, message: ToWorker) -> list[InitReply]:
        """The answers of all ranks."""
        self._send(message)
        answers = [self._receive_init_reply(rank) for rank in self._ranks]
        if failed := next((answer.failed for answer in answers if answer.failed), None):
            self.close()
            raise _error(failed)
        return answers

    def _receive_init_reply(self, rank: RankProcess) -> InitReply:
        while True:
            message = self._next(rank, time.monotonic() + LOAD_TIMEOUT)
            if isinstance(message, InitReply):
                return message

    @property
    def _tokens(self) -> int:
        """Number of tokens of the steps in flight."""
        return sum(tokens for tokens, _ in self._steps)

    def _deadline(self, tokens: int) -> float:
        """Time by which an answer must come that the worker gives after computing so many tokens."""
        timeout = TIMEOUT_FACTOR * self._options.engine_iteration_timeout
        return time.monotonic() + self._times.expected(tokens) + timeout if timeout else float("inf")

    def _send(self, message: ToWorker) -> None:
        encoded, deadline = encoder.encode(message), self._deadline(self._tokens)
        try:
            for rank in self._ranks:
                rank.send(encoded, deadline)
        except (TimeoutError, PeerLostError) as error:
            self._lost(error, rank)
        except KeyboardInterrupt:  # parts of the message may have been written
            self._kill()
            raise

    def _receive(self, rank: RankProcess, deadline: float) -> None:
        message = self._next(rank, deadline)
        if isinstance(message, StepReply):
            if self._num_abandoned:
                self._num_abandoned -= 1
            else:
                self._outputs.append(message)
        elif isinstance(message, CallReply):
            pending = self._calls[message.number]
            pending.ranks.remove(rank.rank)
            pending.answers.insert(0 if rank.rank == 0 else len(pending.answers), message)
            if not pending.ranks:
                del self._calls[message.number]
                _settle(pending)

    def _next(self, rank: RankProcess, deadline: float) -> FromWorker:
        try:
            return rank.receive(deadline)
        except (TimeoutError, PeerLostError) as error:
            self._lost(error, rank)

    def _lost(self, error: Exception, awaited: RankProcess) -> NoReturn:
        """Kill all workers, and raise ``WorkerLostError`` that names the rank that has ended or is the slowest."""
        ended = [rank for rank in self._ranks if rank.end_reason is not None]
        if ended:
            words = f"{ended[0]} ended: {ended[0].end_reason}"
        else:
            computes = self._steps or any(isinstance(call.op, Propose) for call in self._calls.values())
            late = self._ranks[self._slowest()] if computes else awaited
            words = f"{late} has not answered in time and was killed (--engine-iteration-timeout)"
        self._kill()
        lost = WorkerLostError(words)
        for pending in self._calls.values():
            pending.future.set_exception(lost)
        self._calls.clear()
        raise lost from error

    def _slowest(self) -> int:
        if self._memory is None:
            return 0
        from penstock.parallel.shared_memory import slowest

        return slowest(self._memory, self._size, self._stages)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()


def _smallest(profiles: list[MemoryProfile]) -> MemoryProfile:
    """One that has as many blocks as the rank with the fewest. Blocks of pipeline stages differ in size."""
    block_bytes = max(profile.block_bytes for profile in profiles)
    return MemoryProfile(
        free=int(min(profile.free / profile.block_bytes for profile in profiles) * block_bytes),
        total=min(profile.total for profile in profiles),
        block_bytes=block_bytes,
        host_block_bytes=max(profile.host_block_bytes for profile in profiles),
    )


def _settle(pending: _PendingCall) -> None:
    """Complete a call that all ranks have answered, with rank 0's answer, or the error of a rank that failed."""
    if failed := next((answer.failed for answer in pending.answers if answer.failed), None):
        pending.future.set_exception(_error(failed))
    else:
        pending.future.set_result(pending.answers[0].value)


def _error(failed: Failed) -> Exception:
    return PenstockError.of(failed.failure) if failed.failure else StepFailedError(failed.words)


def _shut_down_workers(ranks: list[RankProcess], ended: select.epoll, memory: int | None, owner: int) -> None:
    """End the workers, and close the descriptors of their rings and shared memory."""
    if os.getpid() != owner:  # a fork of the process that has started them
        return
    for rank in ranks:
        rank.ask_to_end()
    for rank in ranks:
        rank.close()
    ended.close()
    if memory is not None:
        os.close(memory)
