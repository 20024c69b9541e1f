"""Row-wise kernels: norms, rotary embedding, activations and scaling."""

import triton
import triton.language as tl


@triton.jit
def sum_pairs(x):
    """Sum over the last dimension, a power of two: adjacent elements first, then adjacent sums, and so on.

    The order of ``tl.sum`` depends on how the compiler distributes a tensor over threads, which may differ between
    kernels. The order of ``sum_pairs`` is fixed, and costs no time, since the first sums are within a thread.
    """
    for _ in tl.static_range(16):
        if x.shape[-1] > 1:
            x = tl.sum(x.reshape(x.shape[:-1] + [x.shape[-1] // 2, 2]), -1)  # noqa: RUF005 (Triton has no stars)
    return x.reshape(x.shape[:-1])


@triton.jit
def inverse_rms(x, size, eps):
    """Inverse RMS of rows of ``size`` elements, padded with zeros to a power of two."""
    return tl.rsqrt(sum_pairs(x * x) / size + eps)


@triton.jit
def scale_by_weights(x32, weights, dtype: tl.constexpr):
    """Multiply normalized float32 values by weights. Weights of ``dtype``: round the values before the multiplication;
    float32 weights: round the result."""
    if weights.dtype == dtype:
        return x32.to(dtype) * weights
    return (x32 * weights).to(dtype)


@triton.jit
def rms_norm(x, weight, out, stride, group_size, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """RMS norm. One program per row: row ``program % group_size`` of a token; the rows of a token are contiguous."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    start = (row // group_size).to(tl.int64) * stride + row % group_size * SIZE
    row_values = tl.load(x + start + columns, mask=inside, other=0.0)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    x32 = row_values.to(tl.float32)
    normed = scale_by_weights(x32 * inverse_rms(x32, SIZE, eps), weights, row_values.dtype)
    tl.store(out + row.to(tl.int64) * SIZE + columns, normed, mask=inside)


@triton.jit
def add_rms_norm(x, residual, weight, out, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Addition of ``x`` to the residual stream, then RMS norm. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    added = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    added += tl.load(residual + row * SIZE + columns, mask=inside, other=0.0)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(residual + row * SIZE + columns, added, mask=inside)
    x32 = added.to(tl.float32)
    normed = scale_by_weights(x32 * inverse_rms(x32, SIZE, eps), weights, added.dtype)
    tl.store(out + row * SIZE + columns, normed, mask=inside)


@triton.jit
def layer_norm(x, weight, bias, out, stride, group_size, weight_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Layer norm. One program per row: row ``program % group_size`` of a token. The weights of these rows are
    ``weight_stride`` elements apart."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    group = row % group_size
    start = (row // group_size).to(tl.int64) * stride + group * SIZE
    row_values = tl.load(x + start + columns, mask=inside, other=0.0)
    x32 = row_values.to(tl.float32)
    centered = tl.where(inside, x32 - sum_pairs(x32) / SIZE, 0.0)
    weights = tl.load(weight + group * weight_stride + columns, mask=inside, other=0.0)
    normed = centered * inverse_rms(centered, SIZE, eps) * weights
    if bias is not None:
        normed += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * SIZE + columns, normed.to(row_values.dtype), mask=inside)


@triton.jit
def add(x, residual, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``residual += x`` for a block of columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    added = tl.load(x + row * stride + columns, mask=inside) + tl.load(residual + row * SIZE + columns, mask=inside)
    tl.store(residual + row * SIZE + columns, added, mask=inside)


@triton.jit
def rotate(low, high, table, position, size, columns, inside):
    """Rotate the two halves of heads, of ``size`` elements each. Returns float32."""
    cos = tl.load(table + position * 2 * size + columns, mask=inside, other=0.0)[None]
    sin = tl.load(table + position * 2 * size + size + columns, mask=inside, other=0.0)[None]
    low, high = low.to(tl.float32), high.to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def rope(
    x, positions, table, out, stride, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotary embedding of a block of heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None]
    at = heads[:, None] * (2 * HALF) + columns[None]
    low = tl.load(x + token * stride + at, mask=inside)
    high = tl.load(x + token * stride + HALF + at, mask=inside)
    out_low, out_high = rotate(low, high, table, tl.load(positions + token), HALF, columns, columns < HALF)
    target = out + token * (HEADS * 2 * HALF)
    tl.store(target + at, out_low.to(low.dtype), mask=inside)
    tl.store(target + HALF + at, out_high.to(low.dtype), mask=inside)


@triton.jit
def rope_partial(
    x,
    positions,
    table,
    out,
    stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotary embedding of the first ``2 * HALF`` elements of a block of heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None]
    first = columns * 2 if INTERLEAVED else columns
    distance: tl.constexpr = 1 if INTERLEAVED else HALF
    at = heads[:, None] * DIM + first[None]
    low = tl.load(x + token * stride + at, mask=inside, other=0.0)
    high = tl.load(x + token * stride + distance + at, mask=inside, other=0.0)
    position = tl.maximum(tl.load(positions + token), 0)  # padding may have any position
    out_low, out_high = rotate(low, high, table, position, HALF, columns, columns < HALF)
    target = out + token * (HEADS * DIM)
    tl.store(target + at, out_low.to(low.dtype), mask=inside)
    tl.store(target + distance + at, out_high.to(low.dtype), mask=inside)
    rest = 2 * HALF + tl.arange(0, REST)
    rest_mask = (heads < HEADS)[:, None] & (rest < DIM)[None]
    at = heads[:, None] * DIM + rest[None]
    tl.store(target + at, tl.load(x + token * stride + at, mask=rest_mask), mask=rest_mask)


@triton.jit
def tanh(x):
    """tanh with an error of at most 1e-7 (Cephes; Moshier, 1984)."""
    square = x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    positive = 1.0 - 2.0 / (tl.exp(tl.minimum(2.0 * tl.abs(x), 40.0)) + 1.0)
    return tl.where(square < 0.390625, p * square * x + x, tl.where(x < 0, -positive, positive))


@triton.jit
def apply_activation(x, FUNCTION: tl.constexpr):
    """Function of ``ACTIVATIONS`` in float32."""
    if FUNCTION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif FUNCTION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # x * (1 + tanh(y)) / 2 = x * sigmoid(2 * y)
        exponent = -1.5957691216057308 * (x + 0.044715 * x * x * x)
        result = x / (1.0 + tl.exp(tl.minimum(exponent, 80.0)))
    elif FUNCTION == "relu":
        result = tl.maximum(x, 0.0)
    elif FUNCTION == "relu2":
        positive = tl.maximum(x, 0.0)
        result = positive * positive
    else:
        result = tanh(x)
    return result


@triton.jit
def gated(gate, up, FUNCTION: tl.constexpr):
    """``activation_and_mul`` in float32."""
    if FUNCTION == "swigluoai":
        gate = tl.where(gate > 7.0, 7.0, gate)  # unlike tl.minimum, keeps NaN
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        result = (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    elif FUNCTION == "swiglu10":
        gate = tl.where(gate > 10.0, 10.0, gate)
        up = tl.where(up > 10.0, 10.0, tl.where(up < -10.0, -10.0, up))
        result = apply_activation(gate, "silu") * up
    else:
        result = apply_activation(gate, FUNCTION) * up
    return result


@triton.jit
def activation(
    x,
    out,
    stride,
    out_stride,
    SIZE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Activation of a block of columns of a row; if GATED, times the same columns of the row's second half."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    row_values = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    if GATED:
        up = tl.load(x + row * stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        result = gated(row_values.to(tl.float32), up, FUNCTION)
    else:
        result = apply_activation(row_values.to(tl.float32), FUNCTION)
    tl.store(out + row * out_stride + columns, result.to(row_values.dtype), mask=inside)


@triton.jit
def scale(x, out, stride, factor, cap, SIZE: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Scaling and soft cap of a block of columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    row_values = tl.load(x + row * stride + columns, mask=inside)
    result = row_values.to(tl.float32) * factor
    if CAPPED:
        result = tanh(result / cap) * cap
    tl.store(out + row * SIZE + columns, result.to(row_values.dtype), mask=inside)


@triton.jit
def gaussian_topk(x, out, stride, multiplier, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``relu(x - (mean + multiplier * standard deviation))`` of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    row_values = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    x32 = row_values.to(tl.float32)
    mean = sum_pairs(x32) / SIZE
    centered = tl.where(inside, x32 - mean, 0.0)
    cutoff = mean + tl.sqrt(sum_pairs(centered * centered) / SIZE) * multiplier
    result = tl.maximum(x32 - cutoff, 0.0)
    tl.store(out + row * SIZE + columns, result.to(row_values.dtype), mask=inside)


@triton.jit
def multiply(
    x, gate, out, stride, gate_stride, out_stride, SIZE: tl.constexpr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of columns of a row, times those of another row, to which a function may be applied first."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    row_values = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    factor = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if FUNCTION == "sigmoid":
        factor = 1.0 / (1.0 + tl.exp(-factor))
    elif FUNCTION != "":
        factor = apply_activation(factor, FUNCTION)
    result = row_values.to(tl.float32) * factor
    tl.store(out + row * out_stride + columns, result.to(row_values.dtype), mask=inside)


@triton.jit
def gated_rms_norm(
    x,
    gate,
    weight,
    out,
    stride,
    gate_stride,
    weight_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of a group of a row, multiplied by the row's gate before or after the norm. Grid: row, group."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(1) * SIZE + columns
    row_values = tl.load(x + row * stride + at, mask=inside, other=0.0)
    factor = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + tl.program_id(1) * weight_stride + columns, mask=inside, other=0.0)
    factor = (1.0 if SIGMOID else factor) / (1.0 + tl.exp(-factor))
    x32 = row_values.to(tl.float32)
    if GATE_FIRST:
        x32 *= factor
    normed = scale_by_weights(x32 * inverse_rms(x32, SIZE, eps), weights, row_values.dtype)
    if not GATE_FIRST:
        normed = (normed.to(tl.float32) * factor).to(row_values.dtype)
    tl.store(out + row * out_stride + at, normed, mask=inside)
