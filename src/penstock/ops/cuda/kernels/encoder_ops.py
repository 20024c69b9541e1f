"""Row-wise kernels of encoders: activation functions."""

import triton
import triton.language as tl

from .elementwise import tanh


@triton.jit
def pointwise(
    x,
    out,
    stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
):
    """A function of some columns of a row; with ``GATED`` times the columns of the row's second half."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    given = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    if FUNCTION == "gelu":
        result = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        result = 0.5 * wide * (1.0 + tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))
    elif FUNCTION == "relu":
        result = tl.maximum(wide, 0.0)
    elif FUNCTION == "silu":
        result = wide / (1.0 + tl.exp(-wide))
    else:
        result = tanh(wide)
    if GATED:
        result *= tl.load(x + row * stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, result.to(given.dtype), mask=inside)
