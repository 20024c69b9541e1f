"""Layout of ranks: tensor-parallel ranks, pipeline stages and nodes, and the connections between nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec


class RankInfo(msgspec.Struct, frozen=True):
    """A rank of the layout: tensor-parallel rank ``rank`` (of ``size``) of pipeline stage ``stage`` (of ``stages``).
    Each of the ``nnodes`` nodes has the same number of consecutive world ranks."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1
    nnodes: int = 1

    @property
    def world_rank(self) -> int:
        return self.stage * self.size + self.rank

    @property
    def world_size(self) -> int:
        return self.stages * self.size

    @property
    def node(self) -> int:
        return self.world_rank // self.local_size

    @property
    def local_rank(self) -> int:
        """Index of the rank on its node."""
        return self.world_rank % self.local_size

    @property
    def local_size(self) -> int:
        """Number of ranks per node."""
        return self.world_size // self.nnodes

    def at(self, world_rank: int) -> RankInfo:
        """The rank with another world rank of the same layout."""
        stage, rank = divmod(world_rank, self.size)
        return RankInfo(rank, self.size, stage, self.stages, self.nnodes)

    def sends_to(self, other: RankInfo) -> bool:
        """True if ``other`` is a rank of the same stage on another node, and receives this rank's outputs. On each
        other node, one rank receives them for all ranks of the stage."""
        if self.stage != other.stage or self.node == other.node:
            return False
        here, there = self._stage_ranks_on(self.node), self._stage_ranks_on(other.node)
        return there[here.index(self.world_rank) % len(there)] == other.world_rank

    def precedes(self, other: RankInfo) -> bool:
        """True if ``other`` receives this rank's hidden states, as the same rank of the next pipeline stage."""
        return self.stage + 1 == other.stage and self.rank == other.rank

    def is_connected_to(self, other: RankInfo) -> bool:
        """True if the two ranks are on different nodes and exchange data."""
        return self.node != other.node and (
            self.sends_to(other) or other.sends_to(self) or self.precedes(other) or other.precedes(self)
        )

    def _stage_ranks_on(self, node: int) -> list[int]:
        """World ranks of this rank's pipeline stage that are on ``node``."""
        ranks = range(self.stage * self.size, (self.stage + 1) * self.size)
        return [rank for rank in ranks if rank // self.local_size == node]


def ranks_of(size: int, stages: int, nnodes: int) -> list[RankInfo]:
    """All ranks of a layout, in order of the world rank."""
    return [RankInfo(rank, size, stage, stages, nnodes) for stage in range(stages) for rank in range(size)]


def connections(ranks: list[RankInfo]) -> Iterator[tuple[int, int]]:
    """Pairs of connected world ranks on different nodes, the rank of the lower node first."""
    for lower in ranks:
        for higher in ranks:
            if lower.node < higher.node and lower.is_connected_to(higher):
                yield lower.world_rank, higher.world_rank


def rendezvous_file(memory: int, executor: int, stage: int) -> Path:
    """Path of the rendezvous file of a stage's ranks with GPUs (``torch.distributed.FileStore``).

    Args:
        memory: file descriptor of the ranks' shared memory.
        executor: process id of the executor.
    """
    return Path("/dev/shm") / f"penstock-ranks-{executor}-{os.fstat(memory).st_ino}-{stage}"
