"""bfloat16, float16 and float32 weights as they are."""

from __future__ import annotations

from torch import Tensor

from penstock.ops import Ops


class Dense:
    """A matrix ``[out, in]`` in the model's dtype, with a bias ``[out]`` or none."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias

    def multiply(self, x: Tensor) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, both in the weights' dtype."""
        return self._ops.linear(x, self._weight, self._bias)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows ``[tokens]`` of the matrix, as an embedding tied to it needs them."""
        return self._ops.embedding(rows, self._weight)
