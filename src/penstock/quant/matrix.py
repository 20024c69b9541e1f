"""A matrix in its format, packed once at load."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.ops import PLAIN, Format, Ops


class Matrix:
    """``[out, in]`` with a bias ``[out]`` or none.

    Args:
        parts: some rows after others, as the checkpoint has them, in the model's dtype.
        format: that it is rounded to.
    """

    def __init__(self, ops: Ops, parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = PLAIN) -> None:
        self._ops = ops
        self._matrix = ops.pack(parts, bias, format)

    def multiply(self, x: Tensor, wide: bool = False) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, in the model's dtype, or float32 where ``wide``."""
        return self._ops.linear(x, self._matrix, wide)

    def likeliest(self, x: Tensor) -> Tensor:
        """``[tokens, in]`` to the largest output of each, ``[tokens]`` int64."""
        return self._ops.likeliest(x, self._matrix)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows ``[tokens]`` of the matrix, as an embedding tied to it needs them."""
        return self._ops.embedding(rows, self._matrix)
