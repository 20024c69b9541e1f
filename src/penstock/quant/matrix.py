"""Weight matrices of layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.ops import Ops


class Matrix(Protocol):
    """A weight matrix ``[out, in]`` with an optional bias ``[out]``. Methods write their result to ``out`` if given."""

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        """Multiply ``[tokens, in]``; returns ``[tokens, out]`` in the model's dtype, or float32 (``out_float32``)."""
        ...

    def linear_activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """Multiply ``[tokens, in]``, then apply ``function`` to the first half of the outputs and multiply by the
        second half; returns ``[tokens, out / 2]``."""
        ...


class PackedMatrix:
    """A ``Matrix`` in the packed layout of a backend. Each method calls the op of the same name."""

    def __init__(self, ops: Ops, packed: Any) -> None:
        self._ops = ops
        self.packed = packed

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        """See ``Matrix.linear``."""
        return self._ops.linear(x, self.packed, out_float32, out)

    def linear_activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """See ``Matrix.linear_activation_and_mul``."""
        return self._ops.linear_activation_and_mul(x, self.packed, function, out)

    def argmax(self, x: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Multiply ``[tokens, in]``. Returns the index of each row's largest output that ``bitmask`` allows,
        ``[tokens]`` int64, and the value of that output, ``[tokens]`` float32."""
        return self._ops.argmax(x, self.packed, bitmask)

    def embedding(self, token_ids: Tensor, first: int = 0, out: Tensor | None = None) -> Tensor:
        """Look up ``[tokens]`` int64 to ``[tokens, in]``. The first row of the matrix is that of token ``first``."""
        return self._ops.embedding(token_ids, self.packed, first, out)


class StackedMatrix:
    """A ``Matrix`` stacked from parts with the same input and different formats.

    Args:
        outputs: number of outputs of each part.
    """

    def __init__(self, ops: Ops, parts: Sequence[PackedMatrix], outputs: Sequence[int], dtype: torch.dtype) -> None:
        self._ops = ops
        self.parts = parts
        self.output_ranges = list(pairwise(sum(outputs[:count]) for count in range(len(outputs) + 1)))
        """First output and end (exclusive) of each part."""
        self._dtype = dtype

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        """See ``Matrix.linear``."""
        if out is None:
            dtype = torch.float32 if out_float32 else self._dtype
            out = self._ops.empty((x.shape[0], self.output_ranges[-1][1]), dtype, x.device)
        for part, (first, end) in zip(self.parts, self.output_ranges, strict=True):
            part.linear(x, out_float32, out[:, first:end])
        return out

    def linear_activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        """See ``Matrix.linear_activation_and_mul``."""
        return self._ops.activation_and_mul(self.linear(x), function, out)
