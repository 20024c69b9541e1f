"""Steps of native calls, recorded once and made again for any number of tokens.

A model's step is some hundred calls whose arguments are always the same but for the number of rows. So it runs once
without computing anything, over buffers that are large enough for every step, while the kernels note what they are
asked; from then on a step is one call (the idea of CUDA graphs, without a graph for each shape).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np
import torch
from torch import Tensor

from . import pages
from .batch import Batch

Step = Callable[[Batch], tuple[Tensor, Tensor]]
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
