"""Row-wise kernels: norms, rotary embedding and gates."""

import triton
import triton.language as tl


@triton.jit
def sum_pairs(x):
    """Sum over the last dimension, a power of two: neighbours first, then neighbouring sums, and so on.

    The order of a sum by ``tl.sum`` follows from how the compiler spreads a tensor over threads, which may differ
    between kernels. This one is always the same, and costs the same: the first sums are within a thread.
    """
    for _ in tl.static_range(16):
        if x.shape[-1] > 1:
            x = tl.sum(x.reshape(x.shape[:-1] + [x.shape[-1] // 2, 2]), -1)  # noqa: RUF005 (Triton has no stars)
    return x.reshape(x.shape[:-1])


@triton.jit
def inverse_rms(x, size, eps):
    """Of rows that are filled up with zeros to a power of two."""
    return tl.rsqrt(sum_pairs(x * x) / size + eps)


@triton.jit
def rms_norm(x, weight, out, stride, group_size, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program: row ``program % group_size`` of a token's, which are contiguous."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    start = (row // group_size).to(tl.int64) * stride + row % group_size * SIZE
    given = tl.load(x + start + columns, mask=inside, other=0.0)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    normed = (wide * inverse_rms(wide, SIZE, eps)).to(given.dtype) * weights
    tl.store(out + row.to(tl.int64) * SIZE + columns, normed, mask=inside)


@triton.jit
def add_rms_norm(x, residual, weight, out, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    added = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    added += tl.load(residual + row * SIZE + columns, mask=inside, other=0.0)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(residual + row * SIZE + columns, added, mask=inside)
    wide = added.to(tl.float32)
    normed = (wide * inverse_rms(wide, SIZE, eps)).to(added.dtype) * weights
    tl.store(out + row * SIZE + columns, normed, mask=inside)


@triton.jit
def add(x, residual, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``residual += x`` for some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    added = tl.load(x + row * stride + columns, mask=inside) + tl.load(residual + row * SIZE + columns, mask=inside)
    tl.store(residual + row * SIZE + columns, added, mask=inside)


@triton.jit
def rotate(low, high, table, position, size, columns, inside):
    """The two halves of heads, rotated, in float32; ``size`` is that of a half."""
    cos = tl.load(table + position * 2 * size + columns, mask=inside, other=0.0)[None]
    sin = tl.load(table + position * 2 * size + size + columns, mask=inside, other=0.0)[None]
    low, high = low.to(tl.float32), high.to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def rope(
    x, positions, table, out, stride, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Some heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None]
    at = heads[:, None] * (2 * HALF) + columns[None]
    low = tl.load(x + token * stride + at, mask=inside)
    high = tl.load(x + token * stride + HALF + at, mask=inside)
    turned_low, turned_high = rotate(low, high, table, tl.load(positions + token), HALF, columns, columns < HALF)
    target = out + token * (HEADS * 2 * HALF)
    tl.store(target + at, turned_low.to(low.dtype), mask=inside)
    tl.store(target + HALF + at, turned_high.to(low.dtype), mask=inside)


@triton.jit
def silu_and_mul(gate_up, out, stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * stride + columns, mask=inside)
    up = tl.load(gate_up + row * stride + SIZE + columns, mask=inside)
    wide = gate.to(tl.float32)
    gated = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + row * out_stride + columns, gated.to(gate.dtype), mask=inside)
