"""Row-wise kernels: norms, rotary embedding, gates, and rows by index."""

from __future__ import annotations

from math import prod

from torch import Tensor

from .. import _kernels
from .dtypes import DTYPE_CODES
from .graph import contiguous, empty


def index_select(x: Tensor, rows: Tensor) -> Tensor:
    """As ``reference.index_select``."""
    out = empty((rows.shape[0], *x.shape[1:]), x.dtype)
    x = contiguous(x)
    row_bytes = prod(x.shape[1:]) * x.element_size()
    _kernels.take(x.data_ptr(), rows.data_ptr(), out.data_ptr(), rows.shape[0], row_bytes)
    return out


def clone(x: Tensor) -> Tensor:
    """As ``reference.clone``."""
    x, out = contiguous(x), empty(x.shape, x.dtype)
    _kernels.copy(x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1] * x.element_size())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``reference.rms_norm``."""
    size = x.shape[-1]
    groups = x.shape[1] if x.dim() == 3 else 1
    out = empty(x.shape, x.dtype)
    _kernels.norm(
        x.data_ptr(),
        0,
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        groups,
        size,
        x.stride(0),
        eps,
        DTYPE_CODES[x.dtype],
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``reference.add_rms_norm``; ``residual`` is changed in place."""
    out = empty(x.shape, x.dtype)
    rows, size = x.shape
    _kernels.norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        1,
        size,
        size,
        eps,
        DTYPE_CODES[x.dtype],
    )
    return out, residual


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """As ``reference.add_residual``; ``residual`` is changed in place."""
    rows, size = x.shape
    _kernels.norm(x.data_ptr(), residual.data_ptr(), 0, 0, rows, 1, size, size, 0.0, DTYPE_CODES[x.dtype])
    return residual


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """As ``reference.rope``."""
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
        DTYPE_CODES[x.dtype],
    )
    return out


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """As ``reference.silu_and_mul``, also of ``[tokens, rows, 2 * size]``."""
    *each, size = *gate_up.shape[:-1], gate_up.shape[-1] // 2
    out = empty((*each, size), gate_up.dtype) if out is None else out
    code = DTYPE_CODES[gate_up.dtype]
    _kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), each[0], prod(each[1:]), size, out.stride(-2), code)
    return out
