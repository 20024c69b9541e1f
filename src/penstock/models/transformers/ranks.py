"""Packed matrices of a transformers module, split among tensor-parallel ranks.

Each rank runs the whole module: results are gathered, so that all ranks have the same values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.layers import BuildContext
from penstock.parallel import SINGLE_RANK, Group, Shard, shard_outputs
from penstock.parallel.group import ComputeFn
from penstock.quant import Matrix, PackedMatrix


def gather(group: Group, compute: ComputeFn, rows: int, shard: Shard, dtype: torch.dtype) -> Tensor:
    """``Group.all_gather``, as a tensor that the module may modify."""
    gathered = group.all_gather(compute, rows, shard, dtype)
    return gathered if group.size == 1 else gathered.clone()


def group_of(group: Group, outputs: int) -> Group:
    """The ranks that share a matrix. Every rank has all outputs if there are fewer outputs than ranks."""
    return group if outputs >= group.size else SINGLE_RANK


class GatheredMatrix:
    """A matrix whose outputs are split among ranks.

    Args:
        context: context that the matrix was packed with.
        outputs: number of outputs of all ranks.
    """

    def __init__(self, context: BuildContext, matrix: Matrix, outputs: int, inputs: int) -> None:
        self._matrix = matrix
        self._group = group_of(context.group, outputs)
        self._shard = shard_outputs(self._group, outputs)
        self._inputs = inputs
        self._dtype, self._device = context.dtype, context.device

    def linear(self, x: Tensor, out_float32: bool = False) -> Tensor:
        """Multiply ``[rows, in]``. Returns ``[rows, out]``."""
        dtype = torch.float32 if out_float32 else self._dtype
        return gather(self._group, lambda out: self._matrix.linear(x, out_float32, out), x.shape[0], self._shard, dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix, ``[ids]`` int64 to ``[ids, in]``."""
        matrix, first = self._matrix, self._shard.first
        assert isinstance(matrix, PackedMatrix)
        found = self._group.gather_rows(
            lambda out: matrix.embedding(ids, first, out), ids, self._shard, self._inputs, self._dtype
        )
        return found if self._group.size == 1 else found.clone()

    def whole(self) -> Tensor:
        """The matrix, ``[out, in]``. It is unpacked at each call."""
        return self.rows(torch.arange(self._shard.total, device=self._device))
