"""Argmax of a product without computing most of its outputs.

A large unquantized matrix gets a *sketch*: a copy in 8 bits with bounds of its rounding errors. The product with the
sketch gives a lower and an upper bound of each output. Only outputs with an upper bound of at least the largest lower
bound are computed exactly. The result has the same bits as the argmax of the full product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.quantization import UNQUANTIZED, Format

from .. import _kernels
from .graph import contiguous, empty
from .matrix import Matrix, make_matrix, new_tensors, product_input

MIN_SKETCH_OUTPUTS = 8192
"""Minimum number of outputs for a sketch to be faster."""
BACKOFF_CALLS = 50
"""Number of calls that compute the full product after a call in which the sketch left too many candidates."""


@dataclass
class Sketch:
    """An 8-bit copy of a matrix, with bounds of its errors."""

    native: Any
    """``_kernels.Sketch``."""
    quantized: Matrix
    """The 8-bit copy."""
    bounds: Tensor
    """``[2, panels]`` float32: for each panel, the largest norm of an output's quantization errors, and the largest
    norm of its quantized weights. ``native`` uses this memory."""
    backoff: int = 0
    """Number of remaining calls that do not use the sketch."""

    def argmax(self, x: Tensor, out: Tensor, largest: Tensor, bitmask: int = 0) -> bool:
        """Write the index and value of each row's largest output. Returns False if the full product is required.

        Args:
            x: ``[tokens, in]``, contiguous.
            out: indices, ``[tokens]`` int64.
            largest: values, ``[tokens]`` float32.
            bitmask: address of the bitmask; 0: all outputs are allowed.
        """
        if self.backoff:
            self.backoff -= 1
            return False
        _tensors, addresses = product_input(x, self.quantized)
        done = _kernels.argmax_by_sketch(
            x.data_ptr(), *addresses, self.native, bitmask, out.data_ptr(), largest.data_ptr(), x.shape[0]
        )
        self.backoff = 0 if done else BACKOFF_CALLS
        return done


def sketch_of(matrix: Matrix) -> Sketch | None:
    """Return the sketch of a matrix, created by the first call. None for matrices that are small, quantized, or have a
    bias or values that are not finite."""
    if matrix.sketch is None:
        matrix.sketch = _make_sketch(matrix) or False
    return matrix.sketch or None


def _make_sketch(matrix: Matrix) -> Sketch | None:
    if matrix.format != UNQUANTIZED or "bias" in matrix.tensors or matrix.outputs < MIN_SKETCH_OUTPUTS:
        return None
    int8 = Format(bits=8, activation_bits=8)
    shape = matrix.inputs, matrix.outputs, matrix.dtype
    quantized = make_matrix(new_tensors(*shape, int8), *shape, None, int8)
    panels = -(-matrix.outputs // _kernels.PANEL)
    bounds = torch.empty(2, panels)
    native = _kernels.Sketch(matrix.native, quantized.native, bounds[0].data_ptr(), bounds[1].data_ptr())
    _kernels.sketch(native)
    return Sketch(native, quantized, bounds) if bounds.isfinite().all() else None


def argmax(x: Tensor, matrix: Matrix, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``reference.argmax``. Raises ``ValueError`` for a bitmask of a wrong shape or dtype."""
    x, out, largest = contiguous(x), empty((x.shape[0],), torch.int64), empty((x.shape[0],), torch.float32)
    address = 0
    if bitmask is not None:
        if bitmask.shape != (x.shape[0], -(-matrix.outputs // 32)) or bitmask.dtype is not torch.int32:
            raise ValueError(f"bitmask {tuple(bitmask.shape)} {bitmask.dtype} does not fit {matrix.outputs} outputs")
        bitmask = bitmask.contiguous()
        address = bitmask.data_ptr()
    if (sketch := sketch_of(matrix)) and sketch.argmax(x, out, largest, address):
        return out, largest
    _tensors, addresses = product_input(x, matrix)
    _kernels.argmax(*addresses, matrix.native, address, out.data_ptr(), largest.data_ptr(), x.shape[0])
    return out, largest
