"""Norms, rotary embedding, and other ops on single rows."""

from __future__ import annotations

import torch
from torch import Tensor


def index_select(x: Tensor, rows: Tensor) -> Tensor:
    """Select the rows of ``x``, ``[tokens, ...]``, with the indices ``rows``, ``[rows]`` int64.

    After its first ``index_select``, a captured step must use the selected number of rows in all ops.
    """
    return x[rows]


def clone(x: Tensor) -> Tensor:
    """Copy ``[tokens, size]``."""
    return x.clone()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm (Zhang and Sennrich, 2019) over the last dimension.

    Args:
        weight: ``[size]``. If it has ``x``'s dtype, the normalized vector is rounded to that dtype before it is
            multiplied by the weight, as in Llama; if it is float32, only the result is rounded, as in Gemma.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream. Returns the RMS norm of the sum, and the sum, both ``[tokens, hidden]``.

    A backend may change ``residual`` in place.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al., 2016) over the last dimension. Only the result is rounded.

    Args:
        x: ``[tokens, size]`` or ``[tokens, heads, size]``; tokens may be strided.
        weight: ``[size]`` or ``[heads, size]``, float32.
        bias: ``[size]`` float32, or None.
    """
    centered = x.float() - x.float().mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def scale(x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
    """Multiply ``[rows, size]`` by a factor, then apply the soft cap ``cap * tanh(x / cap)`` (Bello et al., 2016); 0:
    no cap."""
    scaled = x.float() * factor
    return (cap * torch.tanh(scaled / cap) if cap else scaled).to(x.dtype)


def gaussian_topk(x: Tensor, multiplier: float) -> Tensor:
    """Set all but the largest elements of rows ``[tokens, size]`` to zero, as if they were normally distributed:
    ``relu(x - cutoff)`` with ``cutoff = mean + multiplier * standard deviation`` (Gemma 3n). Rows may be strided."""
    mean, deviation = x.float().mean(-1, keepdim=True), x.float().std(-1, correction=0, keepdim=True)
    return (x.float() - (mean + deviation * multiplier)).relu().to(x.dtype)


def to_float32(x: Tensor) -> Tensor:
    """Convert ``[rows, size]`` to float32."""
    return x.float()


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Add ``x`` to the residual stream. Returns the sum, ``[tokens, hidden]``, with the rounding of ``add_rms_norm``.

    A backend may change ``residual`` in place.
    """
    return residual + x


def rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding (Su et al., 2021).

    Args:
        x: ``[tokens, heads, head_dim]``; tokens may be strided.
        positions: ``[tokens]`` int64.
        table: ``[max_len, rotary_dim]`` float32, cosines then sines (``layers.rope``). The first ``rotary_dim`` (0 or
            more) dimensions of a head are rotated.
        interleaved: rotate adjacent dimensions (GPT-J style) instead of the two halves of a head (NeoX style).
    """
    cos, sin = table[positions][:, None].chunk(2, -1)
    rotary_dim = table.shape[1]
    to_rotate, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    low, high = (to_rotate[..., ::2], to_rotate[..., 1::2]) if interleaved else to_rotate.chunk(2, -1)
    pair = low * cos - high * sin, high * cos + low * sin
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated.to(x.dtype), rest), -1)
