"""A tensor-parallel group: ranks that split the outputs of a model's matrices among them.

Matrices are split by outputs alone (column parallel). Every output is one sum over all inputs on one rank, so that
results have the same bits at every size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import invalid

PANEL = 64
"""Outputs that kernels compute together. Shares are whole panels where there are enough of them."""
FIELD = "tensor_parallel_size"


@dataclass(frozen=True)
class Shard:
    """The outputs from ``first`` to ``end``, of ``total``, that a rank computes."""

    first: int
    end: int
    total: int

    def __mul__(self, width: int) -> Shard:
        """The outputs of these heads, ``width`` each."""
        return Shard(self.first * width, self.end * width, self.total * width)

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def rows(self) -> tuple[int, int]:
        """``first`` and ``end``, as of ``BuildContext.read_weight``."""
        return self.first, self.end


ComputeFn = Callable[[Tensor | None], Tensor]
"""Computes a rank's part of what is gathered."""
CombineFn = Callable[[Tensor, Shard], Tensor]
"""Of all rows, ``[tokens * rows_per_token, columns]``, some columns, and which these are, to ``[tokens, columns]``."""


class Group(ABC):
    """One rank's view of its group. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def all_gather(
        self, compute: ComputeFn, rows: int, shard: Shard, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        """``[rows, shard.size]`` of each rank to ``[rows, shard.total]`` on every rank, which nobody may change.

        Args:
            compute: returns this rank's shard. It may be given where to write it.
            shard: this rank's.
            rows_per_token: of ``rows``, which in a captured step vary with the tokens.
        """

    @abstractmethod
    def gather_rows(
        self, compute: ComputeFn, ids: Tensor, shard: Shard, width: int, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        """``[rows, width]``, of which each rank computes some rows, to all of them on every rank, which nobody may
        change.

        Args:
            compute: writes this rank's rows to where it is told, and leaves the others as they are. With None it
                returns all rows, which are then all this rank's.
            ids: ``[rows]`` int64.
            shard: ids whose rows are this rank's.
            rows_per_token: as of ``all_gather``.
        """

    def combine_rows(
        self,
        compute: ComputeFn,
        ids: Tensor,
        shard: Shard,
        width: int,
        dtype: torch.dtype,
        rows_per_token: int,
        combine: CombineFn,
    ) -> Tensor:
        """``[tokens, width]`` on every rank, which nobody may change: what ``combine`` makes of the rows of each token.
        Here every rank combines all columns.

        Args:
            compute, ids, shard, width, dtype, rows_per_token: as of ``gather_rows``.
            combine: called with some or all columns, of which ranks may compute others.
        """
        return combine(self.gather_rows(compute, ids, shard, width, dtype, rows_per_token), Shard(0, width, width))

    @abstractmethod
    def step(self) -> AbstractContextManager[None]:
        """Around all that ranks compute together, one step after the other. An error in one rank's step is an error
        in all ranks'.

        Raises ``RankFailedError`` if the step has failed on another rank.
        """


class RankFailedError(RuntimeError):
    """The step has failed on another rank."""


class SingleRank(Group):
    """A group of one; or the place of a rank in a group, for ``shard_outputs`` and ``shard_heads``."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)

    def all_gather(
        self, compute: ComputeFn, rows: int, shard: Shard, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        return compute(None)

    def gather_rows(
        self, compute: ComputeFn, ids: Tensor, shard: Shard, width: int, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        return compute(None)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


SINGLE_RANK = SingleRank()


def shard_outputs(group: Group, total: int) -> Shard:
    """A rank's shard of a matrix's outputs, or of a vocabulary.

    Raises ``PenstockError`` (``invalid``) if there are fewer than ranks.
    """
    if total < group.size:
        raise invalid(FIELD, f"{group.size} ranks cannot share {total} outputs", total)
    unit = PANEL if total >= PANEL * group.size else 1
    units = -(-total // unit)
    first, end = (min(units * rank // group.size * unit, total) for rank in (group.rank, group.rank + 1))
    return Shard(first, end, total)


def shard_heads(group: Group, num_heads: int, num_kv_heads: int) -> tuple[Shard, Shard]:
    """A rank's shard of attention heads: queries, and the keys and values that they attend to. Where there are fewer
    of the latter than ranks, several ranks keep the same ones.

    Raises ``PenstockError`` (``invalid``) if no such shards are equal.
    """
    rank, size = group.rank, group.size
    if size <= num_kv_heads:
        first, end = (num_kv_heads * number // size for number in (rank, rank + 1))
        queries = num_heads // num_kv_heads
        return Shard(first * queries, end * queries, num_heads), Shard(first, end, num_kv_heads)
    if size % num_kv_heads or num_heads % size:
        message = f"{size} ranks cannot share {num_heads} heads, {num_heads // num_kv_heads} to a key and value"
        raise invalid(FIELD, message, size)
    first = rank * num_kv_heads // size
    queries = num_heads // size
    return Shard(rank * queries, (rank + 1) * queries, num_heads), Shard(first, first + 1, num_kv_heads)
