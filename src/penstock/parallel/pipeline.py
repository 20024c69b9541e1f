"""Pipeline parallelism: stages that compute consecutive layers, each step one stage after the other.

A stage sends the residual stream after its last layer to the next one, which therefore computes the same bits as a
single stage would (GPipe, Huang et al., 2019, without micro-batches of one step: other steps fill the stages).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from .group import RankFailedError

FAILED, NO_TOKENS = b"", b"\0"
"""Sent in place of hidden states: by a stage whose step has failed, and in a step that computes no tokens."""


class Sender(Protocol):
    def send(self, message: bytes) -> None: ...


class Receiver(Protocol):
    def receive(self) -> bytes:
        """The next message; waits for it."""
        ...


class PipelineStage:
    """One rank's view of the pipeline. A rank is connected to the ranks of the previous and the next stage that have
    the same number in their tensor-parallel groups, and sends one message a step.

    Args:
        rank: of this stage.
        size: number of stages.
        previous: where the stage before this one sends to; None for the first.
        following: what the stage after this one receives from; None for the last.
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
        """Context manager around one step of this stage. It sends the hidden states at the end. If the step fails, so
        does the next stage's. The previous stage's message is received in any case."""
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
        """``[tokens, width]``: what the previous stage has sent in this step; waits for it.

        Raises ``RankFailedError`` if the step has failed there.
        """
        return torch.frombuffer(bytearray(self._receive()), dtype=dtype).view(-1, width)

    def send(self, hidden: Tensor) -> None:
        """Send ``[tokens, width]`` to the next stage when the step ends."""
        self._outgoing = hidden.contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def pass_on(self) -> None:
        """In place of ``receive`` and ``send``, in a step that computes no tokens. Raises as ``receive``."""
        if self._previous:
            self._receive()
        self._outgoing = NO_TOKENS

    def _receive(self) -> bytes:
        assert self._previous is not None
        message = self._previous.receive()
        self._received = True
        if message == FAILED:
            raise RankFailedError(f"the step failed in pipeline stage {self.rank - 1} or before")
        return message


SINGLE_STAGE = PipelineStage()
