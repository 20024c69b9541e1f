"""A matrix in its format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.ops import Ops


class Matrix(Protocol):
    """``[out, in]`` with a bias ``[out]`` or none. Methods write their result to ``out`` where it is given."""

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, in the model's dtype or, with ``out_float32``, in float32."""
        ...

    def linear_activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out / 2]``: a function of the product's first half times its second half."""
        ...


class PackedMatrix:
    """A ``Matrix`` that a backend has packed. Methods are the ops of the same name."""

    def __init__(self, ops: Ops, packed: Any) -> None:
        self._ops = ops
        self.packed = packed

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        """As ``Matrix.linear``."""
        return self._ops.linear(x, self.packed, out_float32, out)

    def linear_activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """As ``Matrix.linear_activation_and_mul``."""
        return self._ops.linear_activation_and_mul(x, self.packed, function, out)

    def argmax(self, x: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[tokens, in]`` to the index of each row's largest output among those in ``bitmask``, ``[tokens]`` int64,
        and that output, ``[tokens]`` float32."""
        return self._ops.argmax(x, self.packed, bitmask)

    def embedding(self, token_ids: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
        """``[tokens]`` int64 to those rows of the matrix, whose first is of the token ``first``: ``[tokens, in]``."""
        return self._ops.embedding(token_ids, self.packed, first, out)


class StackedMatrix:
    """A ``Matrix`` of several with one input, whose formats differ.

    Args:
        outputs: of each part.

    ``places`` are the first output of each part, and the end.
    """

    def __init__(self, ops: Ops, parts: Sequence[PackedMatrix], outputs: Sequence[int], dtype: torch.dtype) -> None:
        self._ops = ops
        self.parts = parts
        self.places = list(pairwise(sum(outputs[:count]) for count in range(len(outputs) + 1)))
        self._dtype = dtype

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        """As ``Matrix.linear``."""
        if out is None:
            dtype = torch.float32 if out_float32 else self._dtype
            out = self._ops.empty((x.shape[0], self.places[-1][1]), dtype, x.device)
        for part, (first, end) in zip(self.parts, self.places, strict=True):
            part.linear(x, out_float32, out[:, first:end])
        return out

    def linear_activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """As ``Matrix.linear_activation_and_mul``."""
        return self._ops.activation_and_mul(self.linear(x), function, out)
