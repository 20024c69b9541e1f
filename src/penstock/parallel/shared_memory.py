"""A group of ranks. What they gather lies in memory that all ranks of a host map, into which kernels write their
outputs: gathering is a barrier, and no copy. Between hosts each rank's outputs are sent over TCP within the barrier."""

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
"""Bytes of address space for what is gathered. A page takes memory from its first write on."""
SPINS = 2000
"""Iterations of the busy wait for another rank, some 30 microseconds, before this one sleeps on a futex."""
PATIENCE = 3600.0
"""Timeout of a barrier, seconds. The executor ends ranks that hang long before it."""
LINE = 4096
"""Alignment of buffers, bytes: a page. The first page holds the ranks' barrier state."""


def create_memory(stages: int = 1) -> int:
    """Memory for the group of each pipeline stage: a file descriptor, which all ranks' processes inherit."""
    descriptor = os.memfd_create("penstock-group", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, stages * CAPACITY)
    return descriptor


Place = tuple[int, int, int]
"""How far a rank has come: its step, its stage, and how many of the step's barriers. The least is the slowest rank's: a
stage that waits for the one before is in the same step, and what it has done of it does not count."""


def places(descriptor: int, ranks: Iterable[tuple[int, int]]) -> list[Place]:
    """The place of each of some ranks of this host, given by stage and number within it."""
    found = []
    for stage, rank in ranks:
        with mmap.mmap(descriptor, LINE, prot=mmap.PROT_READ, offset=stage * CAPACITY) as memory:
            place = int(np.frombuffer(memory[:], np.uint64)[rank * _kernels.Group.RANK_BYTES // 8])
        found.append((place >> _kernels.Group.STEP_BITS, stage, place % 2**_kernels.Group.STEP_BITS))
    return found


@dataclass(frozen=True)
class PeerLink:
    """A connection to a rank of the group on another host."""

    socket: int
    """File descriptor of the socket."""
    rank: int
    sends: bool
    """Whether this rank's parts go to that one."""
    receives: bool
    """Whether that one's parts come to this one, and so to all ranks of this host."""


class SharedMemoryGroup(Group):
    """A ``Group`` over ``create_memory``.

    Args:
        patience: seconds that a rank is waited for.
        spins: 0 if ranks share cores.
        stage: of the pipeline.
        links: to ranks of other hosts.

    Where such a link is lost, waiting raises ``ConnectionError``.
    """

    def __init__(
        self,
        descriptor: int,
        rank: int,
        size: int,
        patience: float = PATIENCE,
        spins: int = SPINS,
        stage: int = 0,
        links: Iterable[PeerLink] = (),
    ) -> None:
        super().__init__(rank, size)
        self._memory = np.frombuffer(mmap.mmap(descriptor, CAPACITY, offset=stage * CAPACITY), np.uint8)
        self.native = _kernels.Group(self._memory.ctypes.data, rank, size, spins, patience)
        self._spans_hosts = False
        for link in links:
            self.native.connect(link.socket, link.rank, link.sends, link.receives, CAPACITY)
            self._spans_hosts = True
        self._allocated = self._graphs_end = LINE
        self._steps = 0
        self._buffers = _Buffers(self._allocate)
        self._of_graphs: weakref.WeakKeyDictionary[graph.Arena, _Buffers] = weakref.WeakKeyDictionary()

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
        """After a step that failed, in which ranks have come to different buffers."""
        self._buffers, self._allocated = _Buffers(self._allocate), self._graphs_end

    def _current_buffers(self) -> _Buffers:
        arena = graph.current_arena()
        if arena is None:
            return self._buffers
        return self._of_graphs.setdefault(arena, _Buffers(self._allocate_for_graph))

    def _empty(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        memory = self._current_buffers().take(prod(shape) * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def _allocate(self, size: int) -> np.ndarray:
        first = self._allocated
        self._allocated += -(-size // LINE) * LINE
        if self._allocated > CAPACITY:
            raise MemoryError(f"ranks have no {size} bytes left to share")
        return self._memory[first : first + size]

    def _allocate_for_graph(self, size: int) -> np.ndarray:
        memory = self._allocate(size)
        self._graphs_end = self._allocated
        return memory


class _Buffers:
    """Buffers that are used again, but only after the barrier that follows their last use: until then another rank
    may be reading. All ranks ask for the same sizes in the same order, so that a buffer lies at the same place in all.
    """

    def __init__(self, allocate: Callable[[int], np.ndarray]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._unused: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """``[size]`` uint8, which comes back when its last reference goes."""
        room = 1 << max(size - 1, 0).bit_length()  # so that steps of many sizes use the same ones
        memory = self._free[room].pop() if self._free[room] else self._allocate(room)
        view = memory[:size]
        weakref.finalize(view, self._unused.append, memory)
        return view

    def recycle(self) -> None:
        """After a barrier."""
        while self._unused:
            memory = self._unused.pop(0)
            self._free[len(memory)].append(memory)
