"""Kernels that write to the paged KV cache, and copy between it and transfer buffers.

A layer's cache is ``[blocks, 2, kv_heads, block_size, head_dim]``, with ``[blocks, 2, kv_heads, block_size]`` float32
scales where it is quantized; blocks of all layers lie between each other (``block_stride``).
"""

import triton
import triton.language as tl

from .elementwise import inverse_rms, rotate

MIN_MAGNITUDE = tl.constexpr(1e-30)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds to an integer, halves to even."""


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
    """Both halves of a key (part 0) or value (part 1), each ``[1, columns]`` and 0 beyond the half; a negative slot
    takes nothing."""
    inside = (columns < tl.where(slot >= 0, HALF, 0))[None]
    block, offset = slot // PAGE, slot % PAGE
    row = (part * KV_HEADS + head) * PAGE + offset
    target = values + block * block_stride + row * (2 * HALF) + columns[None]
    if QUANTIZATION != "":
        low, high = low.to(tl.float32), high.to(tl.float32)
        limit: tl.constexpr = 127.0 if QUANTIZATION == "int8" else 448.0
        maximum = tl.maximum(tl.max(tl.abs(low)), tl.max(tl.abs(high)))
        whole = tl.zeros_like(maximum) + limit
        inverse = tl.where(maximum > MIN_MAGNITUDE, tl.div_rn(whole, maximum), 0.0)
        low, high = low * inverse, high * inverse
        if QUANTIZATION == "int8":
            low, high = ((low + ROUND) - ROUND).to(tl.int8), ((high + ROUND) - ROUND).to(tl.int8)
        else:
            low = low.to(tl.float8e4nv, fp_downcast_rounding="rtne")
            high = high.to(tl.float8e4nv, fp_downcast_rounding="rtne")
        tl.store(scales + block * scale_stride + row, tl.div_rn(maximum, whole), mask=slot >= 0)
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
    """Key and value of a token (program 0) and head (program 1)."""
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
    """The halves of heads ``[heads, columns]`` in the dtype of ``x``, with the bits of ``rms_norm`` and ``rope``."""
    at = heads[:, None] * (2 * HALF) + columns[None]
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None]
    low, high = tl.load(x + at, mask=inside, other=0.0), tl.load(x + HALF + at, mask=inside, other=0.0)
    dtype = low.dtype
    if weight is not None:
        # Both halves once more, as one row in which the sum is that of rms_norm.
        whole = tl.arange(0, BLOCK)
        there = (heads < HEADS)[:, None] & (whole < 2 * HALF)[None]
        wide = tl.load(x + heads[:, None] * (2 * HALF) + whole[None], mask=there, other=0.0).to(tl.float32)
        inverse = inverse_rms(wide, 2 * HALF, eps)[:, None]
        own = columns < HALF
        low = (low.to(tl.float32) * inverse).to(dtype) * tl.load(weight + columns, mask=own, other=0.0)[None]
        high = (high.to(tl.float32) * inverse).to(dtype) * tl.load(weight + HALF + columns, mask=own, other=0.0)[None]
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
    """Key and value of a token (program 0) and head (program 1), and the queries that share them."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    position = tl.maximum(tl.load(positions + token), 0)  # of padding it may be anything
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
def exchange_kv(
    values,
    scales,
    slot_mapping,
    buffer,
    places,
    block_stride,
    scale_stride,
    slot_words,
    offset,
    buffer_heads,
    first_head,
    SLOT_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    IMPORT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys (program 1 is 0) or values of a token (program 0) to its place in a transfer buffer, or from it. All are
    words of 32 bits: a vector is ``WORDS`` of numbers, and one more, its scale, if it is quantized."""
    token, part = tl.program_id(0), tl.program_id(1)
    place, slot = tl.load(places + token), tl.load(slot_mapping + token)
    heads, words = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None]
    size: tl.constexpr = WORDS + 1 if QUANTIZED else WORDS
    there = heads < tl.where(place >= 0, KV_HEADS, 0)
    row = (part * KV_HEADS + heads) * PAGE + slot % PAGE
    own = values + slot // PAGE * block_stride + row * WORDS + words
    line = (part * SLOT_TOKENS + place % SLOT_TOKENS) * buffer_heads + first_head + heads
    other = buffer + place // SLOT_TOKENS * slot_words + offset + line * size + words
    inside = there & (words < WORDS)
    if IMPORT:
        tl.store(own, tl.load(other, mask=inside), mask=inside)
    else:
        tl.store(other, tl.load(own, mask=inside), mask=inside)
    if QUANTIZED:
        last = there & (words == WORDS)
        scale = scales + slot // PAGE * scale_stride + row + words * 0
        if IMPORT:
            tl.store(scale, tl.load(other, mask=last), mask=last)
        else:
            tl.store(other, tl.load(scale, mask=last), mask=last)
