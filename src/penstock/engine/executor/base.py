"""The interface between the engine and its workers, wherever these run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..step import StepInput, StepOutput, WorkerCall


class StepFailedError(RuntimeError):
    """A step raised an error in the workers. They can compute the next step."""


class WorkerLostError(RuntimeError):
    """A worker has ended or stopped answering, so no step can be computed. The message names the worker and the
    cause."""


class Executor(ABC):
    """The workers. First ``run`` the calls ``LoadModel``, ``ProfileMemory`` and ``InitCache`` once each, in this order.

    Every method but ``close`` raises ``WorkerLostError`` where a worker is gone; where ``submit`` does not, ``collect``
    does.
    """

    @abstractmethod
    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> None:
        """Start a step. Steps are computed in the order of their submission.

        Args:
            grammar_bitmask: where ``step.has_grammar_bitmask``: ``[positions, vocabulary / 32]`` int32, a bit for
                each token that may be sampled. The positions are, for each row that samples, the next token's and
                those after each of its draft tokens.
        """

    @abstractmethod
    def collect(self) -> StepOutput:
        """Wait for the oldest step that was submitted and not collected. Raises the error of a step that failed."""

    @abstractmethod
    def call(self, call: WorkerCall) -> Future[Any]:
        """Send a call, which is executed after the steps submitted so far. Its future completes in ``wait`` or
        ``poll``."""

    @abstractmethod
    def wait(self, future: Future[Any]) -> None:
        """Block until a future of ``call`` is done."""

    def run(self, call: WorkerCall) -> Any:
        """``call``, and wait for the answer. Raises the error of a worker that failed."""
        future = self.call(call)
        self.wait(future)
        return future.result()

    @abstractmethod
    def poll(self) -> None:
        """Complete futures whose answers have come, without waiting."""

    @abstractmethod
    def close(self) -> None:
        """End the workers."""
