"""The matrices of a layer's experts in their format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.ops import Ops

from .matrix import Matrix, PackedMatrix, StackedMatrix


class ExpertMatrices:
    """``[experts, out, in]``, of which each token takes those of its own experts.

    Args:
        matrices: of equal shapes, one an expert.
        first: number of the first one's expert.

    Raises ``PenstockError`` (``unsupported``) where experts have different formats.
    """

    def __init__(self, ops: Ops, matrices: Sequence[Matrix], first: int, dtype: torch.dtype) -> None:
        self._ops = ops
        self._dtype = dtype
        parts = [_parts(matrix) for matrix in matrices]
        if any(len(own) != len(parts[0]) for own in parts):
            raise PenstockError(Code.UNSUPPORTED, "experts of one layer that are quantized in different ways", "model")
        self._places = matrices[0].places if isinstance(matrices[0], StackedMatrix) else []
        self._parts = [ops.stack_experts(part, first) for part in zip(*parts, strict=True)]

    def linear(self, x: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """As ``reference.experts_linear``."""
        if not self._places:
            return self._ops.experts_linear(x, self._parts[0], ids, out)
        if out is None:
            out = self._ops.empty((*ids.shape, self._places[-1][1]), self._dtype, x.device)
        for part, (first, end) in zip(self._parts, self._places, strict=True):
            self._ops.experts_linear(x, part, ids, out[..., first:end])
        return out

    def linear_activation_and_mul(self, x: Tensor, ids: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """As ``reference.experts_activation_and_mul``."""
        if not self._places:
            return self._ops.experts_activation_and_mul(x, self._parts[0], ids, function, out)
        return self._ops.activation_and_mul(self.linear(x, ids), function, out)


def _parts(matrix: Matrix) -> list[object]:
    """What the backend has packed of a matrix; nothing while a model is built to be written."""
    if isinstance(matrix, StackedMatrix):
        return [packed for part in matrix.parts for packed in _parts(part)]
    assert isinstance(matrix, PackedMatrix)
    return [] if matrix.packed is None else [matrix.packed]
