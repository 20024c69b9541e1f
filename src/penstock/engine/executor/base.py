"""The interface between the engine and its workers, wherever these run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from ..step import MemoryProfile, ModelInfo, Op, StepInput, StepOutput, TransferMemory


class StepFailedError(RuntimeError):
    """A step raised an error in the workers. They can compute the next step."""


class WorkerLostError(RuntimeError):
    """A worker has ended or stopped answering, so no step can be computed. The message names the worker and the
    cause."""


class Executor(Protocol):
    """The workers. Call ``load``, ``profile`` and ``init_cache`` once each, in this order, then the other methods.

    Every method but ``close`` raises ``WorkerLostError`` where a worker is gone; where ``submit`` does not, ``collect``
    does.
    """

    def load(self, weights: str = "") -> ModelInfo:
        """Load the model.

        Args:
            weights: folder of its weights; empty for the model's own.

        Raises ``PenstockError`` where an option or the checkpoint does not allow it.
        """
        ...

    def profile(self) -> MemoryProfile:
        """Measure the memory available for the KV cache, beside weights and the activations of the largest step."""
        ...

    def init_cache(
        self,
        blocks: int,
        host_blocks: int,
        transfer: TransferMemory | None = None,
        offload: TransferMemory | None = None,
    ) -> None:
        """Allocate a KV cache of ``blocks`` blocks, and of ``host_blocks`` in host memory.

        Args:
            transfer: the transfer buffer, for ``ExportKV`` and ``ImportKV``; None without KV transfers.
            offload: the host tier of the prefix cache, for ``RowUpdates.stores`` and ``loads``; None without it.

        Raises ``PenstockError`` where that is impossible.
        """
        ...

    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> None:
        """Start a step. Steps are computed in the order of their submission.

        Args:
            grammar_bitmask: where ``step.has_grammar_bitmask``: ``[positions, vocabulary / 32]`` int32, a bit for
                each token that may be sampled. The positions are, for each row that samples, the next token's and
                those after each of its draft tokens.
        """
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step that was submitted and not collected. Raises the error of a step that failed."""
        ...

    def call(self, op: Op) -> Future[Any]:
        """Send a call, which is executed after the steps submitted so far. Its future completes in ``wait`` or
        ``poll``."""
        ...

    def wait(self, future: Future[Any]) -> None:
        """Block until a future of ``call`` is done."""
        ...

    def poll(self) -> None:
        """Complete futures whose answers have come, without waiting."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...
