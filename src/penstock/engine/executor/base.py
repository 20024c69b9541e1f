"""What the engine asks of its workers, wherever they run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from ..step import MemoryProfile, ModelInfo, Op, StepInput, StepOutput


class StepFailedError(RuntimeError):
    """A step raised an error in the workers. They can be asked for the next one."""


class WorkerLostError(RuntimeError):
    """A worker has died, or does not answer any more: nothing can be computed. The message says which, and why."""


class Executor(Protocol):
    """The workers: ``load``, ``profile`` and ``init_cache`` once each, in this order, then any number of steps.

    All but ``submit`` raise ``WorkerLostError`` where a worker is gone; ``submit`` may.
    """

    def load(self) -> ModelInfo:
        """Read the checkpoint.

        Raises ``PenstockError`` where it, or an option, does not allow a start.
        """
        ...

    def profile(self) -> MemoryProfile:
        """What the KV cache may take beside the weights and the largest step."""
        ...

    def init_cache(self, blocks: int, host_blocks: int) -> None:
        """Allocate the KV cache. Raises ``PenstockError`` where it cannot have such blocks."""
        ...

    def submit(self, step: StepInput, masks: Future[np.ndarray] | None = None) -> None:
        """Start a step. Steps are computed one after the other.

        Args:
            masks: what ``step.masked`` announces, ``[positions, vocabulary / 32]`` int32: for each row that samples,
                and each of its drafts, a bit for each token that may come.
        """
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step that was submitted and not collected. Raises what went wrong in it."""
        ...

    def call(self, op: Op) -> Future[Any]:
        """Have something done after the steps that were submitted; ``wait`` and ``poll`` let the future be done."""
        ...

    def wait(self, future: Future[Any]) -> None:
        """Until a future of ``call`` is done."""
        ...

    def poll(self) -> None:
        """Take in what workers have answered, without waiting."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...
