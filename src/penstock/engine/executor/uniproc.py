"""The executor with one worker in the engine's own process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from penstock.config.options import EngineOptions

from ..step import MemoryProfile, ModelInfo, Op, StepInput, StepOutput, TransferMemory
from ..worker.worker import Worker


class UniProcExecutor:
    """Computes steps in ``submit`` itself where ``max_in_flight`` is 1, else in a thread. On a GPU ``submit`` only
    launches a step, and ``collect`` waits for it, without a thread.

    Args:
        options: of the engine.
        max_in_flight: maximum number of steps in flight at the same time.
    """

    def __init__(self, options: EngineOptions, max_in_flight: int = 1) -> None:
        self._worker = Worker(options)
        self._max_in_flight = max_in_flight
        self._thread: ThreadPoolExecutor | None = None
        self._steps: deque[Future[StepOutput] | Callable[[], StepOutput] | Exception] = deque()

    def load(self, weights: str = "") -> ModelInfo:
        info = self._worker.load(weights)
        if self._max_in_flight > 1 and not info.asynchronous:
            self._thread = ThreadPoolExecutor(1, "worker", initializer=self._worker.use_device)
        return info

    def profile(self) -> MemoryProfile:
        return self._worker.profile()

    def init_cache(
        self,
        blocks: int,
        host_blocks: int,
        transfer: TransferMemory | None = None,
        offload: TransferMemory | None = None,
    ) -> None:
        self._worker.init_cache(blocks, host_blocks, transfer, offload)

    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> None:
        if self._thread:
            self._steps.append(self._thread.submit(self._worker.execute, step, grammar_bitmask))
            return
        try:
            self._steps.append(self._worker.submit(step, grammar_bitmask))
        except Exception as error:
            self._steps.append(error)

    def collect(self) -> StepOutput:
        step = self._steps.popleft()
        if isinstance(step, Future):
            return step.result()
        if isinstance(step, Exception):
            raise step
        return step()

    def call(self, op: Op) -> Future[Any]:
        if not self._thread:
            return self._worker.call(op)
        return self._thread.submit(self._worker.call, op).result()

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
