"""Workers in processes of their own, which a crash or a hang does not take along."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec
import numpy as np

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import PenstockError

from ..exit_status import in_words
from ..step import LoadLoRA, MemoryProfile, ModelInfo, Op, StepInput, StepOutput, encoder
from ..step_times import FIRST_STEP, StepTimes
from .base import StepFailedError, WorkerLostError
from .messages import (
    Answer,
    Call,
    Close,
    Computed,
    Failed,
    FromWorker,
    InitCache,
    Load,
    Masks,
    Profile,
    Start,
    Started,
    Step,
    ToWorker,
    from_worker,
)
from .ring import Descriptors, PeerLostError, Reader, Writer

logger = logging.getLogger(__name__)

RING = 16 * 2**20
"""Bytes of a ring. What is longer is passed on in parts."""
STARTING = 1800.0
"""Seconds that a worker may take to load its model, and to read an adapter."""
PATIENCE = 0.9
"""Of ``engine_iteration_timeout``: the engine names a worker that hangs before it is itself taken for hanging."""
TO_END = 5.0
"""Seconds that a worker has to end by itself."""


class Processes:
    """One worker process, fed over shared memory. No wait is longer than ``engine_iteration_timeout`` beyond the time
    that steps take.

    Args:
        logs: how the worker logs; None for an application's own process, whose log is its own matter.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None) -> None:
        self._options = options
        self._times = StepTimes(FIRST_STEP * options.engine_iteration_timeout)
        self._steps: deque[tuple[int, float]] = deque()
        """Tokens of those in flight, and when each was submitted."""
        self._outputs: deque[Computed] = deque()
        self._calls: dict[int, tuple[Future[Any], Op]] = {}
        self._numbers = 0
        self._collected = 0.0
        self._given_up = 0
        """Steps whose outputs nobody waits for any more."""
        inbox, outbox = Descriptors.create(RING), Descriptors.create(RING)
        start = Start(options, logs, inbox, outbox, os.getpid())
        inherited = (*inbox.all, *outbox.all)
        command = [sys.executable, "-m", "penstock.engine.executor.worker_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(start))
        self._ended = os.pidfd_open(self._process.pid)
        self._writer = Writer(inbox, self._ended)
        self._reader = Reader(outbox, self._ended)
        self._end = weakref.finalize(
            self, _end, self._process, self._writer, self._reader, self._ended, (inbox, outbox)
        )
        """Also called when nobody holds this any more."""

    @property
    def pid(self) -> int:
        """Of the worker's process."""
        return self._process.pid

    def load(self) -> ModelInfo:
        info = self._start(Load()).info
        assert info is not None
        return info

    def profile(self) -> MemoryProfile:
        found = self._start(Profile()).profile
        assert found is not None
        return found

    def init_cache(self, blocks: int, host_blocks: int) -> None:
        self._start(InitCache(blocks, host_blocks))

    def submit(self, step: StepInput, masks: Future[np.ndarray] | None = None) -> None:
        tokens = int(step.lengths.sum()) + len(step.draft_token_ids)
        self._send(Step(step))
        self._steps.append((tokens, time.monotonic()))
        if step.masked:
            assert masks is not None
            try:
                bits = masks.result()
            except BaseException:  # the worker waits for them, and for nothing else
                self._process.kill()
                raise
            self._send(Masks(bits))

    def collect(self) -> StepOutput:
        try:
            while not self._outputs:
                self._receive(self._deadline(self._tokens))
        except KeyboardInterrupt:  # the caller gives the step up; its output comes all the same
            self._steps.popleft()
            self._given_up += 1
            raise
        tokens, submitted = self._steps.popleft()
        now = time.monotonic()
        self._times.add(tokens, now - max(submitted, self._collected))
        self._collected = now
        computed = self._outputs.popleft()
        if computed.failed:
            raise _error(computed.failed)
        assert computed.output is not None
        return computed.output

    def call(self, op: Op) -> Future[Any]:
        self._numbers += 1
        future: Future[Any] = Future()
        self._calls[self._numbers] = future, op
        self._send(Call(self._numbers, op))
        return future

    def wait(self, future: Future[Any]) -> None:
        reads = any(known is future and isinstance(op, LoadLoRA) for known, op in self._calls.values())
        tokens = self._tokens + self._options.max_num_batched_tokens
        deadline = time.monotonic() + STARTING if reads else self._deadline(tokens)
        while not future.done():
            self._receive(deadline)

    def poll(self) -> None:
        while self._reader.waiting():
            self._receive(self._deadline(self._tokens))

    def close(self) -> None:
        self._end()

    # --- Messages ---------------------------------------------------------------------------------------------------

    def _start(self, message: ToWorker) -> Started:
        self._send(message)
        started: FromWorker | None = None
        while not isinstance(started, Started):
            started = self._next(time.monotonic() + STARTING)
        if started.failed:
            self.close()
            raise _error(started.failed)
        return started

    @property
    def _tokens(self) -> int:
        """Of the steps in flight."""
        return sum(tokens for tokens, _ in self._steps)

    def _deadline(self, tokens: int) -> float:
        """Until which an answer must come where so many tokens are to be computed before it."""
        patience = PATIENCE * self._options.engine_iteration_timeout
        return time.monotonic() + self._times.expected(tokens) + patience if patience else float("inf")

    def _send(self, message: ToWorker) -> None:
        try:
            self._writer.send(encoder.encode(message), self._deadline(self._tokens), self._reader)
        except (TimeoutError, PeerLostError) as error:
            self._lost(error)
        except KeyboardInterrupt:  # of the message there may be a part
            self._process.kill()
            raise

    def _receive(self, deadline: float) -> None:
        message = self._next(deadline)
        if isinstance(message, Computed):
            if self._given_up:
                self._given_up -= 1
            else:
                self._outputs.append(message)
        elif isinstance(message, Answer):
            future, _ = self._calls.pop(message.number)
            if message.failed:
                future.set_exception(_error(message.failed))
            else:
                future.set_result(message.value)

    def _next(self, deadline: float) -> FromWorker:
        try:
            message: FromWorker = from_worker.decode(self._reader.receive(deadline))
        except (TimeoutError, PeerLostError) as error:
            self._lost(error)
        return message

    def _lost(self, error: Exception) -> NoReturn:
        who = f"the worker of rank 0 (process {self._process.pid})"
        if isinstance(error, TimeoutError):
            self._process.kill()
            why = "has not answered in time and was killed (--engine-iteration-timeout)"
            self._process.wait()
        else:
            why = f"ended: {in_words(self._process.wait())}"
        lost = WorkerLostError(f"{who} {why}")
        for future, _ in self._calls.values():
            future.set_exception(lost)
        self._calls.clear()
        raise lost from error


def _error(failed: Failed) -> Exception:
    return PenstockError.of(failed.failure) if failed.failure else StepFailedError(failed.words)


def _end(
    process: subprocess.Popen[bytes],
    writer: Writer,
    reader: Reader,
    ended: int,
    descriptors: tuple[Descriptors, Descriptors],
) -> None:
    """End a worker, and close what connects it."""
    try:
        writer.send(encoder.encode(Close()), time.monotonic() + TO_END, reader)
        process.wait(TO_END)
    except (TimeoutError, PeerLostError, subprocess.TimeoutExpired):  # it computes a long step, hangs, or is gone
        process.kill()
        process.wait()
    writer.close()
    reader.close()
    os.close(ended)
    for ring in descriptors:
        ring.close()
