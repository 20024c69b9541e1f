"""A matrix in its format."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.ops import Ops


class Matrix:
    """``[out, in]`` with a bias ``[out]`` or none, packed by a backend. Methods are the ops of the same name, which
    write their result to ``out`` where it is given."""

    def __init__(self, ops: Ops, packed: Any) -> None:
        self._ops = ops
        self._packed = packed

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, in the model's dtype or, with ``out_float32``, in float32."""
        return self._ops.linear(x, self._packed, out_float32, out)

    def linear_silu_and_mul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out / 2]``: SiLU of the product's first half times its second half."""
        return self._ops.linear_silu_and_mul(x, self._packed, out)

    def argmax(self, x: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[tokens, in]`` to the index of each row's largest output among those in ``bitmask``, ``[tokens]`` int64,
        and that output, ``[tokens]`` float32."""
        return self._ops.argmax(x, self._packed, bitmask)

    def embedding(self, token_ids: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
        """``[tokens]`` int64 to those rows of the matrix, whose first is of the token ``first``: ``[tokens, in]``."""
        return self._ops.embedding(token_ids, self._packed, first, out)
