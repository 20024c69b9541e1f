"""Activation functions, row by row."""

from __future__ import annotations

from torch import Tensor

from .. import _kernels
from ..encoder_ops import FUNCTIONS
from .dtypes import DTYPE_CODES
from .graph import empty

FUNCTION_CODES = {name: code for code, name in enumerate(FUNCTIONS)}


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """As ``reference.activation``."""
    return _activation(x, x.shape[1], False, function, out)


def activation_and_mul(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """As ``reference.activation_and_mul``."""
    return _activation(x, x.shape[1] // 2, True, function, out)


def _activation(x: Tensor, size: int, gated: bool, function: str, out: Tensor | None) -> Tensor:
    out = empty((x.shape[0], size), x.dtype) if out is None else out
    _kernels.pointwise(
        x.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        size,
        x.stride(0),
        out.stride(0),
        gated,
        FUNCTION_CODES[function],
        DTYPE_CODES[x.dtype],
    )
    return out
