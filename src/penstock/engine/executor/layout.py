"""Where a rank is: its place among tensor-parallel ranks and pipeline stages, its node, and whom it talks to there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec


class RankInfo(msgspec.Struct, frozen=True):
    """A rank among all: ``rank`` of the ``size`` tensor-parallel ranks of a pipeline stage. Ranks are laid out on nodes
    one after the other, the same number on each."""

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
        """Its number on its node."""
        return self.world_rank % self.local_size

    @property
    def local_size(self) -> int:
        """Number of ranks of each node."""
        return self.world_size // self.nnodes

    def at(self, world_rank: int) -> RankInfo:
        """Another rank of the same world."""
        stage, rank = divmod(world_rank, self.size)
        return RankInfo(rank, self.size, stage, self.stages, self.nnodes)

    def sends_to(self, other: RankInfo) -> bool:
        """Whether this rank's outputs go to that one, of the same stage on another node. On each other node one rank
        of the stage receives them, for all of its node."""
        if self.stage != other.stage or self.node == other.node:
            return False
        own, others = self._stage_ranks_of(self.node), self._stage_ranks_of(other.node)
        return others[own.index(self.world_rank) % len(others)] == other.world_rank

    def precedes(self, other: RankInfo) -> bool:
        """Whether that rank gets this one's hidden states."""
        return self.stage + 1 == other.stage and self.rank == other.rank

    def is_connected_to(self, other: RankInfo) -> bool:
        """Whether a connection between the two, which are on different nodes, is needed."""
        return self.node != other.node and (
            self.sends_to(other) or other.sends_to(self) or self.precedes(other) or other.precedes(self)
        )

    def _stage_ranks_of(self, node: int) -> list[int]:
        """World ranks of this stage on a node."""
        ranks = range(self.stage * self.size, (self.stage + 1) * self.size)
        return [rank for rank in ranks if rank // self.local_size == node]


def ranks_of(size: int, stages: int, nnodes: int) -> list[RankInfo]:
    """All ranks in their order."""
    return [RankInfo(rank, size, stage, stages, nnodes) for stage in range(stages) for rank in range(size)]


def connections(ranks: list[RankInfo]) -> Iterator[tuple[int, int]]:
    """Pairs of world ranks on different nodes that are connected, the rank of the lower node first."""
    for lower in ranks:
        for higher in ranks:
            if lower.node < higher.node and lower.is_connected_to(higher):
                yield lower.world_rank, higher.world_rank


def meeting_point(memory: int, executor: int, stage: int) -> Path:
    """The file by which the ranks of a stage with GPUs find each other.

    Args:
        memory: descriptor of what the ranks of the executor share.
        executor: its process.
    """
    return Path("/dev/shm") / f"penstock-ranks-{executor}-{os.fstat(memory).st_ino}-{stage}"
