"""The interface between the engine and its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..step import StepInput, StepOutput, WorkerCall


class StepFailedError(RuntimeError):
    """A step raised an error in the workers, which can still compute the next one."""


class WorkerLostError(RuntimeError):
    """A worker has ended or does not answer, so no further step can be computed. The message names the worker and
    the cause."""


class Executor(ABC):
    """Runs steps and calls in the workers. ``run`` ``LoadModel``, ``ProfileMemory`` and ``InitCache`` once each, in
    this order, before the first step.

    All methods except ``close`` raise ``WorkerLostError`` if a worker is lost. ``collect`` may raise it for a worker
    that was lost during ``submit``.
    """

    @abstractmethod
    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> None:
        """Start a step. Steps are computed in the order of submission.

        Args:
            grammar_bitmask: ``[positions, vocabulary / 32]`` int32, required if ``step.has_grammar_bitmask``. A set
                bit allows a token. Each row that samples has one position for its next token, and one for the token
                after each of its draft tokens.
        """

    @abstractmethod
    def collect(self) -> StepOutput:
        """Wait for the oldest submitted step that is not collected yet, and return its output. Raises the error of a
        failed step."""

    @abstractmethod
    def call(self, call: WorkerCall) -> Future[Any]:
        """Queue a call after the steps submitted so far. The returned future completes in ``wait`` or ``poll``."""

    @abstractmethod
    def wait(self, future: Future[Any]) -> None:
        """Block until a future returned by ``call`` is done."""

    def run(self, call: WorkerCall) -> Any:
        """Execute a call and return its result. Raises the error of a failed worker."""
        future = self.call(call)
        self.wait(future)
        return future.result()

    @abstractmethod
    def poll(self) -> None:
        """Complete the futures of answered calls, without waiting."""

    @abstractmethod
    def close(self) -> None:
        """End the workers. No other method may be called afterwards."""
