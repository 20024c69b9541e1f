"""A group of ranks that gather outputs in shared memory. Kernels write their outputs into memory that all ranks of a
host map, so a gather is a barrier without copies. Within the barrier, outputs are sent to other hosts over TCP."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from penstock.ops import _kernels
from penstock.ops.cpu import graph

from .group import ComputeFn, Group, RankFailedError, Shard

CAPACITY = 2**36
"""Address space for gathered tensors, in bytes. A page uses memory after its first write."""
SPINS = 2000
"""Iterations of the busy wait for another rank (about 30 microseconds) before this rank sleeps on a futex."""
TIMEOUT = 3600.0
"""Timeout of a barrier in seconds. The executor terminates hanging ranks much earlier."""
PAGE = 4096
"""Size of a page and alignment of buffers, in bytes. The first page has the barrier state of all ranks."""


def create_memory(stages: int = 1) -> int:
    """Create the shared memory of all pipeline stages. Returns a file descriptor, which all ranks inherit."""
    descriptor = os.memfd_create("penstock-group", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, stages * CAPACITY)
    return descriptor


RankProgress = tuple[int, int, int]
"""Progress of a rank: step, stage, and number of barriers in that step. The smallest tuple belongs to the slowest rank.
The stage is compared before the barriers, because a later stage waits for the earlier stages of the same step."""


def rank_progress(descriptor: int, ranks: Iterable[tuple[int, int]]) -> list[RankProgress]:
    """Progress of some ranks on this host.

    Args:
        ranks: for each rank, its stage and its index in the group of the stage.
    """
    progress = []
    for stage, rank in ranks:
        with mmap.mmap(descriptor, PAGE, prot=mmap.PROT_READ, offset=stage * CAPACITY) as memory:
            state = int(np.frombuffer(memory[:], np.uint64)[rank * _kernels.Group.RANK_BYTES // 8])
        progress.append((state >> _kernels.Group.STEP_BITS, stage, state % 2**_kernels.Group.STEP_BITS))
    return progress


@dataclass(frozen=True)
class PeerLink:
    """A connection to a rank of the group on another host."""

    socket: int
    """File descriptor of the socket."""
    rank: int
    sends: bool
    """True if this rank sends its outputs over the link."""
    receives: bool
    """True if this rank receives the other rank's outputs over the link, on behalf of all ranks of this host."""


class SharedMemoryGroup(Group):
    """A ``Group`` in the memory of ``create_memory``. Barriers raise ``ConnectionError`` if a link is lost.

    Args:
        timeout: timeout of a barrier in seconds.
        spins: iterations of the busy wait (``SPINS``); 0 for ranks that share cores.
        stage: index of the pipeline stage.
        links: connections to ranks on other hosts.
    """

    def __init__(
        self,
        descriptor: int,
        rank: int,
        size: int,
        timeout: float = TIMEOUT,
        spins: int = SPINS,
        stage: int = 0,
        links: Iterable[PeerLink] = (),
    ) -> None:
        super().__init__(rank, size)
        self._memory = np.frombuffer(mmap.mmap(descriptor, CAPACITY, offset=stage * CAPACITY), np.uint8)
        self.native = _kernels.Group(self._memory.ctypes.data, rank, size, spins, timeout)
        self._spans_hosts = False
        for link in links:
            self.native.connect(link.socket, link.rank, link.sends, link.receives, CAPACITY)
            self._spans_hosts = True
        self._allocated = self._graphs_end = PAGE
        self._steps = 0
        self._buffers = _Buffers(self._allocate)
        self._graph_buffers: weakref.WeakKeyDictionary[graph.Arena, _Buffers] = weakref.WeakKeyDictionary()

    def all_gather(
        self, compute: ComputeFn, rows: int, shard: Shard, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        gathered = self._empty((rows, shard.total), dtype)
        part, item = gathered[:, shard.first : shard.end], dtype.itemsize
        compute(part)
        if self._spans_hosts:
            sizes = shard.size * item, shard.total * item, rows // rows_per_token, rows_per_token
            _kernels.gather_part(self.native, part.data_ptr(), *sizes)
        else:
            _kernels.barrier(self.native)
        self._current_buffers().recycle()
        return gathered

    def gather_rows(
        self, compute: ComputeFn, ids: Tensor, shard: Shard, width: int, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        rows, row_bytes = ids.shape[0], width * dtype.itemsize
        merged = self._empty((rows, width), dtype)
        compute(merged)
        if self._spans_hosts:
            numbers = rows // rows_per_token, rows_per_token, shard.first, shard.end
            _kernels.gather_rows(self.native, merged.data_ptr(), row_bytes, ids.data_ptr(), *numbers)
        else:
            _kernels.barrier(self.native)
        self._current_buffers().recycle()
        return merged

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps += 1
        self.native.begin(self._steps)
        try:
            yield
        except BaseException:
            self._forget_buffers()
            self.native.end(self._steps, True)
            raise
        if (failed := self.native.end(self._steps, False)) >= 0:
            self._forget_buffers()
            raise RankFailedError(f"the step failed on rank {failed}")
        self._buffers.recycle()

    def _forget_buffers(self) -> None:
        """Drop all buffers after a failed step, in which ranks may have taken different buffers."""
        self._buffers, self._allocated = _Buffers(self._allocate), self._graphs_end

    def _current_buffers(self) -> _Buffers:
        arena = graph.current_arena()
        if arena is None:
            return self._buffers
        return self._graph_buffers.setdefault(arena, _Buffers(self._allocate_for_graph))

    def _empty(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        memory = self._current_buffers().take(prod(shape) * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def _allocate(self, size: int) -> np.ndarray:
        first = self._allocated
        self._allocated += -(-size // PAGE) * PAGE
        if self._allocated > CAPACITY:
            raise MemoryError(f"the shared memory of the ranks ({CAPACITY} bytes) has less than {size} free bytes")
        return self._memory[first : first + size]

    def _allocate_for_graph(self, size: int) -> np.ndarray:
        memory = self._allocate(size)
        self._graphs_end = self._allocated
        return memory


class _Buffers:
    """Pool of buffers. A buffer is only reused after the barrier that follows its last use: another rank may read it
    until then. All ranks take the same sizes in the same order, so a buffer has the same offset on all ranks."""

    def __init__(self, allocate: Callable[[int], np.ndarray]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._unused: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """Take a buffer, ``[size]`` uint8. The buffer returns to the pool when its last reference is deleted."""
        capacity = 1 << max(size - 1, 0).bit_length()  # a power of two, so that steps of different sizes share buffers
        memory = self._free[capacity].pop() if self._free[capacity] else self._allocate(capacity)
        view = memory[:size]
        weakref.finalize(view, self._unused.append, memory)
        return view

    def recycle(self) -> None:
        """Make returned buffers available. Called after a barrier."""
        while self._unused:
            memory = self._unused.pop(0)
            self._free[len(memory)].append(memory)
