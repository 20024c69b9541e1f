"""Activation functions, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import COLUMNS
from .kernels import encoder_ops as kernels
from .launch import launch


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """As ``reference.activation``."""
    return _pointwise(x, x.shape[1], False, function, out)


def activation_and_mul(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """As ``reference.activation_and_mul``."""
    return _pointwise(x, x.shape[1] // 2, True, function, out)


def _pointwise(x: Tensor, size: int, gated: bool, function: str, out: Tensor | None) -> Tensor:
    out = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == out.stride(1) == 1
    launch(
        kernels.pointwise,
        (x.shape[0], -(-size // COLUMNS)),
        x,
        out,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=COLUMNS,
        FUNCTION=function,
        GATED=gated,
    )
    return out
