"""Steps of native calls, recorded once and made again for any number of tokens.

A model's step is some hundred calls whose arguments are always the same but for the number of rows. So it runs once
without computing anything, over buffers that are large enough for every step, while the kernels note what they are
asked; from then on a step is one call (the idea of CUDA graphs, without a graph for each shape).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np
import torch
from torch import Tensor

from . import _kernels, pages
from .batch import Batch, Queries, Step

LARGEST_STEP = 4096
"""Tokens of a step whose buffers are kept."""
_recording = threading.local()


class Arena:
    """Memory of what a recorded step computes. What nobody holds any more while it is recorded is used again by what
    comes later, since the step runs in the same order."""

    def __init__(self) -> None:
        self._all: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def take(self, size: int) -> np.ndarray:
        """``[size]`` uint8, given back when nobody holds it."""
        size = max(size, 1)
        if self._free[size]:
            memory = self._free[size].pop()
        else:
            memory = pages.zeros(size).numpy()  # what no step touches takes no room
            self._all.append(memory)
        view = memory[:]
        weakref.finalize(view, self._free[size].append, memory)
        return view


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As ``torch.empty``; from the arena of the step that this thread records, if it does."""
    arena: Arena | None = getattr(_recording, "arena", None)
    if arena is None:
        return torch.empty(shape, dtype=dtype)
    memory = arena.take(prod(shape) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def contiguous(x: Tensor) -> Tensor:
    """As ``Tensor.contiguous``, which a recorded step cannot do: it makes native calls only."""
    if not x.is_contiguous() and getattr(_recording, "arena", None) is not None:
        raise RuntimeError("a step that is recorded must not copy what is not contiguous")
    return x.contiguous()


@contextmanager
def taking_from(arena: Arena) -> Iterator[None]:
    _recording.arena = arena
    try:
        yield
    finally:
        _recording.arena = None


class Recorded:
    """A step as one native call.

    Args:
        step: makes native calls only, always the same but for the batch.
        tokens, sequences, blocks: of a batch, the latter of one sequence; one of more tokens runs call by call.
        adapted: whether its batches have tokens with adapters.
    """

    def __init__(self, step: Step, tokens: int, sequences: int, blocks: int, adapted: bool = False) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        def queries() -> Queries:
            starts, lengths = zeros(sequences + 1, dtype=torch.int32), zeros(sequences, dtype=torch.int32)
            return Queries(starts, lengths, zeros(sequences, blocks, dtype=torch.int32))

        self._step = step
        self._tokens = tokens
        self._batch = Batch(
            token_ids=zeros(tokens),
            positions=zeros(tokens),
            slots=zeros(tokens),
            queries=queries(),
            logit_rows=zeros(tokens),
            logit_queries=queries(),
            adapters=zeros(tokens, dtype=torch.int32) if adapted else None,
            logit_adapters=zeros(tokens, dtype=torch.int32) if adapted else None,
        )
        self._tape, self._arena = _kernels.Tape(), Arena()
        with taking_from(self._arena):
            self._tape.record()
            try:
                self._out = step(self._batch)
            finally:
                self._tape.stop()

    def __call__(self, batch: Batch) -> Tensor:
        tokens, rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        if tokens > self._tokens:
            return self._step(batch)
        own = self._batch
        own.token_ids[:tokens] = batch.token_ids
        own.positions[:tokens] = batch.positions
        own.slots[:tokens] = batch.slots
        own.logit_rows[:rows] = batch.logit_rows
        for mine, given in ((own.adapters, batch.adapters), (own.logit_adapters, batch.logit_adapters)):
            if mine is not None and given is not None:
                mine[: len(given)] = given
        sequences, of_rows = (
            _fill(mine, given)
            for mine, given in ((own.queries, batch.queries), (own.logit_queries, batch.logit_queries))
        )
        self._tape.run(tokens, sequences, rows, of_rows)
        return self._out[:rows]


def _fill(own: Queries, given: Queries) -> int:
    """Returns how many sequences there are."""
    sequences, blocks = given.block_tables.shape
    own.starts[: sequences + 1] = given.starts
    own.lengths[:sequences] = given.lengths
    own.block_tables[:sequences, :blocks] = given.block_tables
    return sequences
