"""A matrix in its format."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.ops import Ops


class Matrix:
    """``[out, in]`` with a bias ``[out]`` or none, as a backend has packed it."""

    def __init__(self, ops: Ops, packed: Any) -> None:
        self._ops = ops
        self._matrix = packed

    def multiply(self, x: Tensor, wide: bool = False) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, in the model's dtype, or float32 where ``wide``."""
        return self._ops.linear(x, self._matrix, wide)

    def gated(self, x: Tensor) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out / 2]``: SiLU of the first half of outputs by the other half."""
        return self._ops.gated(x, self._matrix)

    def likeliest(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to the largest output of each, ``[tokens]`` int64, of those that bits allow."""
        return self._ops.likeliest(x, self._matrix, allowed)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows ``[tokens]`` of the matrix, as an embedding tied to it needs them."""
        return self._ops.embedding(rows, self._matrix)
