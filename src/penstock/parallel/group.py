"""Tensor-parallel groups: ranks that split the outputs of a model's matrices.

Matrices are split by outputs only (column parallel). Every output is one sum over all inputs on one rank, so results
have the same bits for every number of ranks.
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
"""Number of outputs that kernels compute together. Shards consist of complete panels if every rank can have one."""
FIELD = "tensor_parallel_size"


@dataclass(frozen=True)
class Shard:
    """The outputs of a matrix that a rank computes: indices from ``first`` to ``end`` (exclusive), out of ``total``."""

    first: int
    end: int
    total: int

    def __mul__(self, width: int) -> Shard:
        """The outputs of a shard of heads with ``width`` outputs each."""
        return Shard(self.first * width, self.end * width, self.total * width)

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def rows(self) -> tuple[int, int]:
        """``first`` and ``end``, the argument ``rows`` of ``BuildContext.read_weight``."""
        return self.first, self.end


ComputeFn = Callable[[Tensor | None], Tensor]
"""Function that computes a rank's part of a gathered tensor. Argument: destination of the part; None: a new tensor."""
CombineFn = Callable[[Tensor, Shard], Tensor]
"""Function that combines the rows of each token. Arguments: ``[tokens * rows_per_token, columns]``, and the shard of
these columns. Result: ``[tokens, columns]``."""


class Group(ABC):
    """One rank's view of its group. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def all_gather(
        self, compute: ComputeFn, rows: int, shard: Shard, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        """Gather ``[rows, shard.size]`` of each rank to a read-only ``[rows, shard.total]`` on every rank.

        Args:
            compute: returns this rank's shard; if a destination is given, it also writes the shard there.
            shard: columns of this rank.
            rows_per_token: number of rows per token. In a captured step the number of tokens varies.
        """

    @abstractmethod
    def gather_rows(
        self, compute: ComputeFn, ids: Tensor, shard: Shard, width: int, dtype: torch.dtype, rows_per_token: int = 1
    ) -> Tensor:
        """Gather the rows that each rank computes to a read-only ``[rows, width]`` on every rank.

        Args:
            compute: writes this rank's rows to the destination, and leaves other rows unmodified. Without a destination
                (a group of one rank) it returns all rows.
            ids: ``[rows]`` int64: id of each row, e.g. a token or an expert.
            shard: ids whose rows this rank computes.
            rows_per_token: see ``all_gather``.
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
        """Gather the rows of all ranks, and combine the rows of each token to a read-only ``[tokens, width]`` on every
        rank. In this class every rank combines all columns.

        Args:
            compute, ids, shard, width, dtype, rows_per_token: see ``gather_rows``.
            combine: called with the columns that this rank combines.
        """
        return combine(self.gather_rows(compute, ids, shard, width, dtype, rows_per_token), Shard(0, width, width))

    @abstractmethod
    def step(self) -> AbstractContextManager[None]:
        """Context manager around the computation of one step, which all ranks run together. If the step fails on one
        rank, it fails on all ranks.

        Raises ``RankFailedError`` if the step has failed on another rank.
        """


class RankFailedError(RuntimeError):
    """Raised if the step has failed on another rank."""


class SingleRank(Group):
    """A group of one rank. With ``size`` above 1 it only describes the position of a rank, for ``shard_outputs``."""

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
    """A rank's shard of the outputs of a matrix, or of a vocabulary.

    Raises ``PenstockError`` (``invalid``) for fewer outputs than ranks.
    """
    if total < group.size:
        raise invalid(FIELD, f"{group.size} ranks cannot share {total} outputs: use at most {total} ranks", total)
    unit = PANEL if total >= PANEL * group.size else 1
    units = -(-total // unit)
    first, end = (min(units * rank // group.size * unit, total) for rank in (group.rank, group.rank + 1))
    return Shard(first, end, total)


def shard_heads(group: Group, num_heads: int, num_kv_heads: int) -> tuple[Shard, Shard]:
    """A rank's shards of the query heads, and of the key and value heads that these attend to. With fewer key and value
    heads than ranks, several ranks have the same key and value head.

    Raises ``PenstockError`` (``invalid``) if heads cannot be split evenly.
    """
    rank, size = group.rank, group.size
    if size <= num_kv_heads:
        first, end = (num_kv_heads * number // size for number in (rank, rank + 1))
        queries = num_heads // num_kv_heads
        return Shard(first * queries, end * queries, num_heads), Shard(first, end, num_kv_heads)
    if size % num_kv_heads or num_heads % size:
        message = f"{size} ranks cannot share {num_heads} query heads and {num_kv_heads} key and value heads evenly"
        raise invalid(FIELD, f"{message}: use a divisor of {num_heads} that is a multiple of {num_kv_heads}", size)
    first = rank * num_kv_heads // size
    queries = num_heads // size
    return Shard(rank * queries, (rank + 1) * queries, num_heads), Shard(first, first + 1, num_kv_heads)
