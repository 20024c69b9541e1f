"""Norms, the rotary embedding, and what else is done to each vector."""

from __future__ import annotations

import torch
from torch import Tensor


def index_select(x: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[rows]`` int64 of ``[tokens, ...]``.

    After its first ``index_select``, a captured step must compute with that number of rows only.
    """
    return x[rows]


def clone(x: Tensor) -> Tensor:
    """A copy of ``[tokens, size]``."""
    return x.clone()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension.

    Args:
        weight: ``[size]``. In ``x``'s dtype it multiplies what was rounded to that dtype, as in Llama; in float32 the
            result is rounded only once, as in Gemma.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream; returns the sum normed, and the sum, both ``[tokens, hidden]``.

    A backend may change ``residual`` in place.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al., 2016) over the last dimension, rounded once.

    Args:
        x: ``[tokens, size]`` or ``[tokens, heads, size]``; tokens may lie apart.
        weight: ``[size]`` float32, or ``[heads, size]``.
        bias: ``[size]`` float32, or none.
    """
    centered = x.float() - x.float().mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def scale(x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
    """``[rows, size]`` times a factor; with a cap ``cap * tanh(x / cap)`` of that (soft cap; Bello et al., 2016)."""
    wide = x.float() * factor
    return (cap * torch.tanh(wide / cap) if cap else wide).to(x.dtype)


def to_float32(x: Tensor) -> Tensor:
    """``[rows, size]`` in float32."""
    return x.float()


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Add ``x`` to the residual stream; returns the sum, ``[tokens, hidden]``, as ``add_rms_norm`` has it.

    A backend may change ``residual`` in place.
    """
    return residual + x


def rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding (Su et al., 2021) that rotates the two halves of a head against each other (NeoX style), or,
    interleaved, neighbours (GPT-J style).

    Args:
        x: ``[tokens, heads, head_dim]``; tokens may lie apart.
        positions: ``[tokens]`` int64.
        table: ``[max_len, rotary_dim]`` float32, cosines then sines (``layers.rope``): the first ``rotary_dim`` numbers
            of a head are rotated. It may be 0, which rotates nothing.
    """
    cos, sin = table[positions][:, None].chunk(2, -1)
    rotary = table.shape[1]
    wide, passed = x[..., :rotary].float(), x[..., rotary:]
    low, high = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = low * cos - high * sin, high * cos + low * sin
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((rotated.to(x.dtype), passed), -1)
