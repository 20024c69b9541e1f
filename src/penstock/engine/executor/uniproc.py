"""The executor with one worker, in the engine's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from penstock.config.options import EngineOptions

from ..step import InitCache, StepInput, StepOutput, WorkerCall
from ..worker.worker import Worker
from .base import Executor


class UniProcExecutor(Executor):
    """Executor with one worker in this process.

    On a CPU, ``submit`` computes the step, or passes it to a thread if ``max_in_flight`` exceeds 1. On a GPU,
    ``submit`` launches the step without a thread, and ``collect`` waits for the result.

    Args:
        options: options of the engine.
        max_in_flight: maximum number of steps that are submitted and not collected yet.
    """

    def __init__(self, options: EngineOptions, max_in_flight: int = 1) -> None:
        self._worker = Worker(options)
        self._max_in_flight = max_in_flight
        self._thread: ThreadPoolExecutor | None = None
        self._steps: deque[Callable[[], StepOutput]] = deque()
        """Functions that wait for the steps in flight, oldest first."""

    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> None:
        if self._thread:
            self._steps.append(self._thread.submit(self._worker.execute, step, grammar_bitmask).result)
        else:
            self._steps.append(self._worker.submit(step, grammar_bitmask))

    def collect(self) -> StepOutput:
        return self._steps.popleft()()

    def call(self, call: WorkerCall) -> Future[Any]:
        if self._thread:
            return self._thread.submit(self._worker.call, call).result()
        future = self._worker.call(call)
        if isinstance(call, InitCache) and self._max_in_flight > 1 and not self._worker.asynchronous:
            self._thread = ThreadPoolExecutor(1, "worker", initializer=self._worker.use_device)
        return future

    def wait(self, future: Future[Any]) -> None:
        while not future.done():
            wait(self._worker.pending_loads)
            self.poll()

    def poll(self) -> None:
        if not self._thread:
            self._worker.poll()
        else:
            self._thread.submit(self._worker.poll).result()

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown()
        self._worker.close()
