"""Pipeline parallelism: stages that compute consecutive layers. A step passes through the stages in order.

A stage sends the residual stream after its last layer to the next stage, so results have the same bits as with a single
stage. As in GPipe (Huang et al., 2019), stages work at the same time, but on different steps, not on micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from .group import RankFailedError

FAILED, NO_TOKENS = b"", b"\0"
"""Messages sent instead of hidden states if the step has failed, and if the step has no tokens."""


class Sender(Protocol):
    def send(self, message: bytes) -> None: ...


class Receiver(Protocol):
    def receive(self) -> bytes:
        """Wait for the next message."""
        ...


class PipelineStage:
    """One rank's view of the pipeline. It is connected to the ranks of the previous and the next stage with the same
    tensor-parallel rank, and sends one message per step.

    Args:
        rank: index of this stage.
        size: number of stages.
        previous: receives from the previous stage; None for the first stage.
        following: sends to the next stage; None for the last stage.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, previous: Receiver | None = None, following: Sender | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._previous = previous
        self._following = following
        self._received = False
        self._outgoing = FAILED

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around one step of this stage. At the end it sends the hidden states; if the step failed, it
        sends ``FAILED``, so that the next stage also fails. The message of the previous stage is always received."""
        self._received, self._outgoing = False, FAILED
        try:
            yield
        except BaseException:
            self._outgoing = FAILED
            raise
        finally:
            if self._previous and not self._received:
                self._previous.receive()
            if self._following:
                self._following.send(self._outgoing)

    def receive(self, width: int, dtype: torch.dtype) -> Tensor:
        """Wait for the hidden states of the previous stage in this step, ``[tokens, width]``.

        Raises ``RankFailedError`` if the step has failed in a previous stage.
        """
        return torch.frombuffer(bytearray(self._receive()), dtype=dtype).view(-1, width)

    def send(self, hidden: Tensor) -> None:
        """Send ``[tokens, width]`` to the next stage when the step ends."""
        self._outgoing = hidden.contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def pass_on(self) -> None:
        """Run a step without tokens, instead of ``receive`` and ``send``. Raises the error of ``receive``."""
        if self._previous:
            self._receive()
        self._outgoing = NO_TOKENS

    def _receive(self) -> bytes:
        assert self._previous is not None
        message = self._previous.receive()
        self._received = True
        if message == FAILED:
            raise RankFailedError(f"the step failed in pipeline stage {self.rank - 1} or an earlier stage")
        return message


SINGLE_STAGE = PipelineStage()
