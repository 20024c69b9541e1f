"""Residual streams of AltUp (Gemma 3n)."""

from __future__ import annotations

from torch import Tensor

from .elementwise import norm_warps, power_of_two
from .kernels import streams as kernels
from .launch import launch


def equalize_streams(x: Tensor, streams: int, min_square: float) -> Tensor:
    """See ``reference.equalize_streams``. ``x`` is changed in place."""
    rows, size = x.shape[0], x.shape[1] // streams
    assert x.is_contiguous()
    block, warps = power_of_two(size), norm_warps(size)
    grid = rows, streams - 1
    launch(kernels.equalize_streams, grid, x, min_square, STREAMS=streams, SIZE=size, BLOCK=block, num_warps=warps)
    return x
