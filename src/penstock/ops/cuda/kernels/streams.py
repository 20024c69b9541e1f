"""Kernels of several residual streams."""

import triton
import triton.language as tl

from .elementwise import sum_pairs


@triton.jit
def equalize_streams(x, min_square, STREAMS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Scale a stream of a row to the root mean square of the first stream. Grid: row, stream - 1."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    first = tl.load(x + row * STREAMS * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    at = x + (row * STREAMS + tl.program_id(1) + 1) * SIZE + columns
    part = tl.load(at, mask=inside, other=0.0)
    x32 = part.to(tl.float32)
    square = tl.maximum(sum_pairs(x32 * x32) / SIZE, min_square)
    factor = tl.sqrt(sum_pairs(first * first) / SIZE) / tl.sqrt(square)
    tl.store(at, (x32 * factor).to(part.dtype), mask=inside)
