"""Row-wise kernels: norms, rotary embedding, activations, scaling, and row selection."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import elementwise as kernels
from .launch import launch

COLUMNS = 1024
"""Number of columns of a row that a program computes, in kernels without reductions."""
HEADS = 8
"""Number of heads that a program rotates."""


def power_of_two(size: int) -> int:
    """Round up to a power of two."""
    return 1 << (size - 1).bit_length()


def norm_warps(size: int) -> int:
    """Number of warps to read a row at once: each thread reads 16 bytes of 16-bit elements."""
    return min(max(power_of_two(size) // 256, 1), 32)


def index_select(x: Tensor, rows: Tensor) -> Tensor:
    """See ``reference.index_select``."""
    return torch.index_select(x, 0, rows)


def clone(x: Tensor) -> Tensor:
    """See ``reference.clone``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``. ``x`` is ``[tokens, size]`` or ``[tokens, heads, size]``; tokens may be strided."""
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    assert x.stride(-1) == 1 and (heads == 1 or x.stride(1) == size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (x.shape[0] * heads,)
    launch(
        kernels.rms_norm,
        grid,
        x,
        weight,
        out,
        x.stride(0),
        heads,
        eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        num_warps=norm_warps(size),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``. ``residual`` is changed in place."""
    rows, size = x.shape
    assert x.stride(1) == 1 and residual.is_contiguous()
    out = torch.empty_like(residual)
    launch(
        kernels.add_rms_norm,
        (rows,),
        x,
        residual,
        weight,
        out,
        x.stride(0),
        eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        num_warps=norm_warps(size),
    )
    return out, residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See ``reference.layer_norm``."""
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    assert x.stride(-1) == 1 and (heads == 1 or x.stride(1) == size) and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        kernels.layer_norm,
        (x.shape[0] * heads,),
        x,
        weight,
        bias,
        out,
        x.stride(0),
        heads,
        size if weight.dim() == 2 else 0,
        eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        num_warps=norm_warps(size),
    )
    return out


def scale(x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
    """See ``reference.scale``."""
    rows, size = x.shape
    assert x.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = rows, -(-size // COLUMNS)
    launch(kernels.scale, grid, x, out, x.stride(0), factor, cap, SIZE=size, CAPPED=bool(cap), BLOCK=COLUMNS)
    return out


def gaussian_topk(x: Tensor, multiplier: float) -> Tensor:
    """See ``reference.gaussian_topk``."""
    rows, size = x.shape
    assert x.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, warps = power_of_two(size), norm_warps(size)
    launch(kernels.gaussian_topk, (rows,), x, out, x.stride(0), multiplier, SIZE=size, BLOCK=block, num_warps=warps)
    return out


def to_float32(x: Tensor) -> Tensor:
    """See ``reference.to_float32``."""
    return x.float()


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """See ``reference.add_residual``. ``residual`` is changed in place."""
    rows, size = x.shape
    assert x.stride(1) == 1 and residual.is_contiguous()
    launch(kernels.add, (rows, -(-size // COLUMNS)), x, residual, x.stride(0), SIZE=size, BLOCK=COLUMNS)
    return residual


def rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """See ``reference.rope``."""
    tokens, heads, dim = x.shape
    assert x.stride(2) == 1 and (x.stride(1) == dim or heads == 1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if interleaved or table.shape[1] < dim:
        half = table.shape[1] // 2
        launch(
            kernels.rope_partial,
            (tokens, -(-heads // HEADS)),
            x,
            positions,
            table,
            out,
            x.stride(0),
            HEADS=heads,
            DIM=dim,
            HALF=half,
            INTERLEAVED=interleaved,
            ROWS=min(HEADS, power_of_two(heads)),
            BLOCK=power_of_two(max(half, 1)),
            REST=power_of_two(max(dim - 2 * half, 1)),
            num_warps=2,
        )
        return out
    launch(
        kernels.rope,
        (tokens, -(-heads // HEADS)),
        x,
        positions,
        table,
        out,
        x.stride(0),
        HEADS=heads,
        HALF=dim // 2,
        ROWS=min(HEADS, power_of_two(heads)),
        BLOCK=power_of_two(dim // 2),
        num_warps=2,
    )
    return out


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """See ``reference.activation``. ``x`` has two or three dimensions."""
    if x.dim() == 3:
        flat = _activate(x.flatten(0, 1), x.shape[2], function, None if out is None else out.flatten(0, 1), gated=False)
        shaped: Tensor = flat.unflatten(0, x.shape[:2])
        return shaped
    return _activate(x, x.shape[1], function, out, gated=False)


def activation_and_mul(gate_up: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """See ``reference.activation_and_mul``. ``gate_up`` has two dimensions."""
    return _activate(gate_up, gate_up.shape[1] // 2, function, out, gated=True)


def _activate(x: Tensor, size: int, function: str, out: Tensor | None, gated: bool) -> Tensor:
    """Launch the activation kernel for ``size`` outputs per row."""
    rows = x.shape[0]
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == out.stride(1) == 1
    launch(
        kernels.activation,
        (rows, -(-size // COLUMNS)),
        x,
        out,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        FUNCTION=function,
        GATED=gated,
        BLOCK=COLUMNS,
    )
    return out


def multiply(x: Tensor, gate: Tensor, function: str = "", out: Tensor | None = None) -> Tensor:
    """See ``reference.multiply``. The function may also be "sigmoid"."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == gate.stride(1) == out.stride(1) == 1
    launch(
        kernels.multiply,
        (rows, -(-size // COLUMNS)),
        x,
        gate,
        out,
        x.stride(0),
        gate.stride(0),
        out.stride(0),
        SIZE=size,
        FUNCTION=function,
        BLOCK=COLUMNS,
    )
    return out


def multiply_gate(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``reference.multiply_gate``."""
    result = multiply(x.flatten(1), gate.flatten(1), "sigmoid", out)
    return result.view(x.shape) if out is None else result


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_first: bool = False,
    out: Tensor | None = None,
    sigmoid: bool = False,
) -> Tensor:
    """See ``reference.gated_rms_norm``."""
    size = weight.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == gate.stride(1) == out.stride(1) == 1 and weight.dtype is x.dtype and weight.is_contiguous()
    launch(
        kernels.gated_rms_norm,
        (x.shape[0], x.shape[1] // size),
        x,
        gate,
        weight,
        out,
        x.stride(0),
        gate.stride(0),
        size if weight.dim() == 2 else 0,
        out.stride(0),
        eps,
        SIZE=size,
        GATE_FIRST=gate_first,
        SIGMOID=sigmoid,
        BLOCK=power_of_two(size),
        num_warps=norm_warps(size),
    )
    return out
