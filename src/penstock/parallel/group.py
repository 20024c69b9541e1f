"""A tensor-parallel group: ranks that split the outputs of a model's matrices among them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid


@dataclass(frozen=True)
class Group:
    """One rank's view of its group.

    Matrices are split by outputs alone (column parallel). Every output is one sum over all inputs on one rank, so that
    results have the same bits at every size.
    """

    rank: int = 0
    size: int = 1

    def shard(self, total: int) -> tuple[int, int]:
        """First and end of this rank's share of ``total`` outputs or heads.

        Raises ``PenstockError`` (``invalid``) where the ranks' shares would differ.
        """
        if total % self.size:
            raise invalid("tensor_parallel_size", f"{total} heads or outputs do not divide by {self.size}", self.size)
        share = total // self.size
        return self.rank * share, (self.rank + 1) * share

    def shard_size(self, total: int) -> int:
        """Size of this rank's share of ``total`` outputs or heads."""
        first, end = self.shard(total)
        return end - first

    def all_gather(self, x: Tensor) -> Tensor:
        """``[tokens, share]`` of each rank to ``[tokens, total]`` on every rank."""
        if self.size > 1:
            raise PenstockError(Code.UNSUPPORTED, "only one rank is supported", "tensor_parallel_size")
        return x


SINGLE_RANK = Group()
