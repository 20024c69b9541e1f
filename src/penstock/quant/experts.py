"""The stacked matrices of a layer's experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.ops import Ops

from .matrix import Matrix, PackedMatrix, StackedMatrix


class ExpertMatrices:
    """Matrices of experts, ``[experts, out, in]``. Each token is multiplied by the matrices of its selected experts.

    Args:
        matrices: one matrix per expert, of equal shapes.
        first: expert id of the first matrix.

    Raises ``PenstockError`` (``unsupported``) if experts have different formats.
    """

    def __init__(self, ops: Ops, matrices: Sequence[Matrix], first: int, dtype: torch.dtype) -> None:
        self._ops = ops
        self._dtype = dtype
        parts = [_parts(matrix) for matrix in matrices]
        if any(len(expert_parts) != len(parts[0]) for expert_parts in parts):
            message = "the experts of a layer are quantized in different formats: quantize all experts in one format"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        self._output_ranges = matrices[0].output_ranges if isinstance(matrices[0], StackedMatrix) else []
        self._parts = [ops.stack_experts(part, first) for part in zip(*parts, strict=True)]

    def linear(self, x: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``ops.reference.experts_linear``."""
        if not self._output_ranges:
            return self._ops.experts_linear(x, self._parts[0], ids, out)
        if out is None:
            out = self._ops.empty((*ids.shape, self._output_ranges[-1][1]), self._dtype, x.device)
        for part, (first, end) in zip(self._parts, self._output_ranges, strict=True):
            self._ops.experts_linear(x, part, ids, out[..., first:end])
        return out

    def linear_activation_and_mul(self, x: Tensor, ids: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """See ``ops.reference.experts_activation_and_mul``."""
        if not self._output_ranges:
            return self._ops.experts_activation_and_mul(x, self._parts[0], ids, function, out)
        return self._ops.activation_and_mul(self.linear(x, ids), function, out)


def _parts(matrix: Matrix) -> list[object]:
    """Packed matrices of the backend; empty if the model is only built to write an engine folder."""
    if isinstance(matrix, StackedMatrix):
        return [packed for part in matrix.parts for packed in _parts(part)]
    assert isinstance(matrix, PackedMatrix)
    return [] if matrix.packed is None else [matrix.packed]
