"""Row-wise kernels: norms, rotary embedding, activations, scaling, and row selection."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .. import _kernels
from ..activations import ACTIVATIONS, GATES
from .dtypes import DTYPE_CODES
from .graph import contiguous, empty

ACTIVATION_CODES = {name: code for code, name in enumerate((*ACTIVATIONS, *GATES))}
"""Number of each activation in the kernels."""


def index_select(x: Tensor, rows: Tensor) -> Tensor:
    """See ``reference.index_select``."""
    out = empty((rows.shape[0], *x.shape[1:]), x.dtype)
    x = x if x[0].is_contiguous() else contiguous(x)
    row_bytes, stride = prod(x.shape[1:]) * x.element_size(), x.stride(0) * x.element_size()
    _kernels.index_select(x.data_ptr(), rows.data_ptr(), out.data_ptr(), rows.shape[0], row_bytes, stride)
    return out


def clone(x: Tensor) -> Tensor:
    """See ``reference.clone``."""
    x, out = contiguous(x), empty(x.shape, x.dtype)
    _kernels.copy(x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1] * x.element_size())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    out = empty(x.shape, x.dtype)
    _norm(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``. ``residual`` is changed in place."""
    out = empty(x.shape, x.dtype)
    _norm(x, residual, weight, out, eps)
    return out, residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See ``reference.layer_norm``."""
    out = empty(x.shape, x.dtype)
    _norm(x, None, weight, out, eps, centered=True, bias=bias)
    return out


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """See ``reference.add_residual``. ``residual`` is changed in place."""
    _norm(x, residual, None, None, 0.0)
    return residual


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    eps: float,
    centered: bool = False,
    bias: Tensor | None = None,
) -> None:
    """Add ``x`` to ``residual`` (unless None), and write the norm of the sum to ``out`` (unless None).

    Args:
        centered: layer norm instead of RMS norm.
    """
    size = x.shape[-1]
    wide = centered or (weight is not None and weight.dtype is not x.dtype)
    assert weight is None or weight.is_contiguous()
    assert not wide or (weight is not None and weight.dtype is torch.float32)
    _kernels.norm(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if out is None else out.data_ptr(),
        x.shape[0],
        x.shape[1] if x.dim() == 3 else 1,
        size,
        x.stride(0),
        eps,
        DTYPE_CODES[x.dtype],
        wide,
        centered,
        size if weight is not None and weight.dim() == 2 else 0,
        0 if bias is None else bias.data_ptr(),
    )


def scale(x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
    """See ``reference.scale``."""
    x, out = contiguous(x), empty(x.shape, x.dtype)
    _kernels.scale(x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], factor, cap, DTYPE_CODES[x.dtype])
    return out


def gaussian_topk(x: Tensor, multiplier: float) -> Tensor:
    """See ``reference.gaussian_topk``."""
    assert x.stride(1) == 1
    out = empty(x.shape, x.dtype)
    _kernels.gaussian_topk(
        x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), x.shape[1], multiplier, DTYPE_CODES[x.dtype]
    )
    return out


def to_float32(x: Tensor) -> Tensor:
    """See ``reference.to_float32``."""
    x, out = contiguous(x), empty(x.shape, torch.float32)
    _kernels.to_float32(x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], DTYPE_CODES[x.dtype])
    return out


def rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """See ``reference.rope``."""
    tokens, heads, dim = x.shape
    out = empty((tokens, heads, dim), x.dtype)
    _kernels.rope(
        x.data_ptr(),
        out.data_ptr(),
        positions.data_ptr(),
        table.data_ptr(),
        tokens,
        heads,
        dim,
        x.stride(0),
        table.shape[1],
        interleaved,
        DTYPE_CODES[x.dtype],
    )
    return out


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """See ``reference.activation``."""
    return _activate(x, x.shape[-1], function, out, gated=False)


def activation_and_mul(gate_up: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """See ``reference.activation_and_mul``. ``gate_up`` has two or three dimensions."""
    return _activate(gate_up, gate_up.shape[-1] // 2, function, out, gated=True)


def row_stride(x: Tensor) -> int:
    """Distance of two rows of ``[tokens, size]`` or ``[tokens, rows, size]``, in elements."""
    return x.stride(0 if x.dim() == 2 or x.shape[1] == 1 else 1)  # a dimension of size 1 may have any stride


def _activate(x: Tensor, size: int, function: str, out: Tensor | None, gated: bool) -> Tensor:
    first, *rest = x.shape[:-1]
    out = empty((first, *rest, size), x.dtype) if out is None else out
    numbers = first, prod(rest), size, row_stride(x), row_stride(out), ACTIVATION_CODES[function]
    _kernels.activate(x.data_ptr(), out.data_ptr(), *numbers, gated, DTYPE_CODES[x.dtype])
    return out
