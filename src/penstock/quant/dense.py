"""bfloat16, float16 and float32 weights as they are."""

from __future__ import annotations

from torch import Tensor

from penstock.ops import Ops


class Dense:
    """A matrix ``[out, in]`` in the model's dtype, with a bias ``[out]`` or none."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._matrix = ops.pack(weight, bias)

    def multiply(self, x: Tensor, wide: bool = False) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, in the model's dtype, or float32 where ``wide``."""
        return self._ops.linear(x, self._matrix, wide)

    def likeliest(self, x: Tensor) -> Tensor:
        """``[tokens, in]`` to the largest output of each, ``[tokens]`` int64."""
        return self._ops.likeliest(x, self._matrix)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows ``[tokens]`` of the matrix, as an embedding tied to it needs them."""
        return self._ops.embedding(rows, self._matrix)
