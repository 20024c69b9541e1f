"""A group of ranks that share the layers' matrices (Shoeybi et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core import Code, PenstockError


@dataclass(frozen=True)
class Group:
    """One rank's view of its group. Layers ask it for their part and for sums over all; models never see it."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1:
            raise PenstockError(Code.UNSUPPORTED, "tensor parallelism is not there yet: a group has one rank")

    def part(self, total: int) -> int:
        """This rank's share of ``total`` equal things."""
        return total // self.size

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice of a whole matrix."""
        return tensor.chunk(self.size, dim)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' partial results, on every rank."""
        return x


ALONE = Group()
