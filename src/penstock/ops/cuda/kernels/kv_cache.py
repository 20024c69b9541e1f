"""Kernels that write to the paged KV cache, or copy between the cache and transfer buffers.

A layer's cache is ``[blocks, 2, kv_heads, block_size, head_dim]``, with ``[blocks, 2, kv_heads, block_size]`` float32
scales if it is quantized. A block contains all layers, so that blocks of a layer are ``block_stride`` elements apart.
"""

import triton
import triton.language as tl

from .elementwise import inverse_rms, rotate

MIN_MAGNITUDE = tl.constexpr(1e-30)
"""Vectors up to this magnitude are quantized to zeros."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting this number rounds to an integer, half to even."""


@triton.jit
def store_vector(
    low,
    high,
    values,
    scales,
    slot,
    part,
    head,
    block_stride,
    scale_stride,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    columns,
):
    """Stores both halves of a key (part 0) or value (part 1), each ``[1, columns]`` and padded with zeros. Does nothing
    for a negative slot."""
    inside = (columns < tl.where(slot >= 0, HALF, 0))[None]
    block, offset = slot // PAGE, slot % PAGE
    row = (part * KV_HEADS + head) * PAGE + offset
    target = values + block * block_stride + row * (2 * HALF) + columns[None]
    if QUANTIZATION != "":
        low, high = low.to(tl.float32), high.to(tl.float32)
        limit: tl.constexpr = 127.0 if QUANTIZATION == "int8" else 448.0
        maximum = tl.maximum(tl.max(tl.abs(low)), tl.max(tl.abs(high)))
        limits = tl.zeros_like(maximum) + limit
        inverse = tl.where(maximum > MIN_MAGNITUDE, tl.div_rn(limits, maximum), 0.0)
        low, high = low * inverse, high * inverse
        if QUANTIZATION == "int8":
            low, high = ((low + ROUND) - ROUND).to(tl.int8), ((high + ROUND) - ROUND).to(tl.int8)
        else:
            low = low.to(tl.float8e4nv, fp_downcast_rounding="rtne")
            high = high.to(tl.float8e4nv, fp_downcast_rounding="rtne")
        tl.store(scales + block * scale_stride + row, tl.div_rn(maximum, limits), mask=slot >= 0)
    tl.store(target, low, mask=inside)
    tl.store(target + HALF, high, mask=inside)


@triton.jit
def store_kv(
    k,
    v,
    values,
    scales,
    slot_mapping,
    k_stride,
    v_stride,
    block_stride,
    scale_stride,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores keys and values. Grid: token, KV head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, BLOCK)
    inside = (columns < HALF)[None]
    for part in tl.static_range(2):
        source = (k + token * k_stride if part == 0 else v + token * v_stride) + head * (2 * HALF) + columns[None]
        low, high = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
        store_vector(
            low, high, values, scales, slot, part, head, block_stride, scale_stride,
            KV_HEADS, HALF, PAGE, QUANTIZATION, columns,
        )  # fmt: skip


@triton.jit
def norm_and_rotate(x, weight, table, position, eps, heads, HEADS, HALF: tl.constexpr, columns, BLOCK: tl.constexpr):
    """Norm and rotary embedding of heads, with the same bits as ``rms_norm`` and ``rope``. Returns both halves
    ``[heads, columns]`` in the dtype of ``x``, their offsets, and their mask."""
    at = heads[:, None] * (2 * HALF) + columns[None]
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None]
    low, high = tl.load(x + at, mask=inside, other=0.0), tl.load(x + HALF + at, mask=inside, other=0.0)
    dtype = low.dtype
    if weight is not None:
        # Load both halves again as one row, so that the sum has the same bits as in rms_norm.
        full_columns = tl.arange(0, BLOCK)
        full_mask = (heads < HEADS)[:, None] & (full_columns < 2 * HALF)[None]
        x32 = tl.load(x + heads[:, None] * (2 * HALF) + full_columns[None], mask=full_mask, other=0.0).to(tl.float32)
        inverse = inverse_rms(x32, 2 * HALF, eps)[:, None]
        mask = columns < HALF
        low = (low.to(tl.float32) * inverse).to(dtype) * tl.load(weight + columns, mask=mask, other=0.0)[None]
        high = (high.to(tl.float32) * inverse).to(dtype) * tl.load(weight + HALF + columns, mask=mask, other=0.0)[None]
    low, high = rotate(low, high, table, position, HALF, columns, columns < HALF)
    return low.to(dtype), high.to(dtype), at, inside


@triton.jit
def rope_and_store(
    q,
    k,
    v,
    positions,
    table,
    values,
    scales,
    slot_mapping,
    q_weight,
    k_weight,
    out,
    eps,
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    scale_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm and rotary embedding of queries and keys; stores keys and values. Grid: token, KV head with its queries."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    position = tl.maximum(tl.load(positions + token), 0)  # padding may have any position
    columns = tl.arange(0, HALF_BLOCK)

    queries = q + token * q_stride + head * (GROUP * 2 * HALF)
    low, high, at, inside = norm_and_rotate(
        queries, q_weight, table, position, eps, tl.arange(0, ROWS), GROUP, HALF, columns, BLOCK
    )
    target = out + (token * KV_HEADS + head) * (GROUP * 2 * HALF)
    tl.store(target + at, low, mask=inside)
    tl.store(target + HALF + at, high, mask=inside)

    key = k + token * k_stride + head * (2 * HALF)
    low, high, _, _ = norm_and_rotate(key, k_weight, table, position, eps, tl.arange(0, 1), 1, HALF, columns, BLOCK)
    store_vector(
        low, high, values, scales, slot, 0, head, block_stride, scale_stride,
        KV_HEADS, HALF, PAGE, QUANTIZATION, columns,
    )  # fmt: skip

    value = v + token * v_stride + head * (2 * HALF) + columns[None]
    inside = (columns < HALF)[None]
    low, high = tl.load(value, mask=inside, other=0.0), tl.load(value + HALF, mask=inside, other=0.0)
    store_vector(
        low, high, values, scales, slot, 1, head, block_stride, scale_stride,
        KV_HEADS, HALF, PAGE, QUANTIZATION, columns,
    )  # fmt: skip


@triton.jit
def transfer_kv(
    values,
    scales,
    slot_mapping,
    buffer,
    places,
    block_stride,
    scale_stride,
    slot_elements,
    offset,
    buffer_heads,
    first_head,
    SLOT_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    IMPORT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies keys or values of a token to a transfer buffer, or with IMPORT from the buffer. Grid: token, part (0:
    keys, 1: values). Elements have 32 bits: a vector has ``ELEMENTS`` elements, followed by its scale if quantized."""
    token, part = tl.program_id(0), tl.program_id(1)
    buffer_position, slot = tl.load(places + token), tl.load(slot_mapping + token)
    heads, elements = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None]
    size: tl.constexpr = ELEMENTS + 1 if QUANTIZED else ELEMENTS
    head_mask = heads < tl.where(buffer_position >= 0, KV_HEADS, 0)
    row = (part * KV_HEADS + heads) * PAGE + slot % PAGE
    cached = values + slot // PAGE * block_stride + row * ELEMENTS + elements
    line = (part * SLOT_TOKENS + buffer_position % SLOT_TOKENS) * buffer_heads + first_head + heads
    buffered = buffer + buffer_position // SLOT_TOKENS * slot_elements + offset + line * size + elements
    inside = head_mask & (elements < ELEMENTS)
    if IMPORT:
        tl.store(cached, tl.load(buffered, mask=inside), mask=inside)
    else:
        tl.store(buffered, tl.load(cached, mask=inside), mask=inside)
    if QUANTIZED:
        last = head_mask & (elements == ELEMENTS)
        scale = scales + slot // PAGE * scale_stride + row + elements * 0
        if IMPORT:
            tl.store(scale, tl.load(buffered, mask=last), mask=last)
        else:
            tl.store(buffered, tl.load(scale, mask=last), mask=last)
