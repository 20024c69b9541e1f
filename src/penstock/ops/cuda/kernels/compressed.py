"""Kernels of compressed attention and hyper-connections (DeepSeek-V4)."""

import triton
import triton.language as tl

from .elementwise import inverse_rms, scale_by_weights
from .states import sequence_inputs, sigmoid


@triton.jit
def token_of_entry(
    at,
    columns,
    inside,
    first,
    before,
    start,
    slot,
    x,
    kept,
    state,
    stride,
    max_drafts,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Columns of the token at position ``at`` of a sequence: among the tokens of the step, the first of which is at
    position ``first``, the accepted drafts, or the last tokens in the state."""
    index = at - first
    row = x + (start + index) * stride
    row = tl.where(index < 0, kept + (slot * max_drafts + before + index) * WIDTH, row)
    row = tl.where(index < -before, state + (slot * SPAN + at % SPAN) * WIDTH, row)
    return tl.load(row + columns, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["sequences", "max_drafts"])
def compress(
    starts,
    slots,
    accepted,
    positions,
    slot_mapping,
    x,
    kept,
    state,
    bias,
    norm,
    table,
    values,
    sequences,
    stride,
    max_drafts,
    block_stride,
    eps,
    DIM: tl.constexpr,
    RATE: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROPE: tl.constexpr,
    OFFSET: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The entry that ends with a token, if there is one. Grid: token.

    The tokens of an entry are read twice: for the largest gate of each channel, then for the weighted sum.
    """
    SPAN: tl.constexpr = 2 * RATE if OVERLAP else RATE
    CHANNELS: tl.constexpr = 2 * DIM if OVERLAP else DIM
    token = tl.program_id(0)
    sequence = tl.full((), -1, tl.int32)
    for begin in range(0, sequences, SEQUENCES):
        each = begin + tl.arange(0, SEQUENCES)
        firsts = tl.load(starts + each, mask=each < sequences, other=1 << 30)
        sequence += tl.sum((firsts <= token).to(tl.int32), 0)
    slot = tl.load(slots + sequence).to(tl.int64)
    start = tl.load(starts + sequence).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    target_slot = tl.load(slot_mapping + token)
    is_token = (token < tl.load(starts + sequences)) & (slot >= 0) & (target_slot >= 0)
    if is_token & ((position + 1) % RATE == 0):
        first = position - (token - start).to(tl.int32)
        before = tl.load(accepted + sequence)
        columns = tl.arange(0, BLOCK)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for i in range(tl.maximum(SPAN - 1 - position, 0), SPAN):
            at = position + 1 - SPAN + i
            channel = columns
            if OVERLAP:
                channel += tl.where(i < RATE, 0, DIM)
            gate = token_of_entry(
                at, CHANNELS + channel, columns < DIM, first, before, start, slot, x, kept, state,
                stride, max_drafts, 2 * CHANNELS, SPAN,
            )  # fmt: skip
            added = tl.load(bias + at % RATE * CHANNELS + channel, mask=columns < DIM, other=0.0)
            largest = tl.maximum(largest, gate.to(tl.float32) + added)
        total = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        for i in range(tl.maximum(SPAN - 1 - position, 0), SPAN):
            at = position + 1 - SPAN + i
            channel = columns
            if OVERLAP:
                channel += tl.where(i < RATE, 0, DIM)
            value = token_of_entry(
                at, channel, columns < DIM, first, before, start, slot, x, kept, state,
                stride, max_drafts, 2 * CHANNELS, SPAN,
            )  # fmt: skip
            gate = token_of_entry(
                at, CHANNELS + channel, columns < DIM, first, before, start, slot, x, kept, state,
                stride, max_drafts, 2 * CHANNELS, SPAN,
            )  # fmt: skip
            added = tl.load(bias + at % RATE * CHANNELS + channel, mask=columns < DIM, other=0.0)
            weight = tl.exp(gate.to(tl.float32) + added - largest)
            total += weight
            weighted += value.to(tl.float32) * weight
        entry = tl.where(columns < DIM, weighted / total, 0.0)
        weights = tl.load(norm + columns, mask=columns < DIM, other=0.0)
        dtype: tl.constexpr = x.dtype.element_ty
        normed = scale_by_weights(entry * inverse_rms(entry, DIM, eps), weights, dtype).to(tl.float32)
        even, odd = tl.split(normed.reshape([BLOCK // 2, 2]))
        pairs = tl.arange(0, BLOCK // 2)
        rotary = pairs - (DIM - ROPE) // 2
        is_rotary = (rotary >= 0) & (rotary < ROPE // 2)
        angles = table + (position + 1 - RATE) * ROPE + rotary
        cos = tl.load(angles, mask=is_rotary, other=1.0)
        sin = tl.load(angles + ROPE // 2, mask=is_rotary, other=0.0)
        target = values + target_slot // PAGE * block_stride + target_slot % PAGE * ROW + OFFSET + 2 * pairs
        stored = 2 * pairs < DIM
        kind: tl.constexpr = values.dtype.element_ty
        tl.store(target, (even * cos - odd * sin).to(dtype).to(kind), mask=stored)
        tl.store(target + 1, (odd * cos + even * sin).to(dtype).to(kind), mask=stored)


@triton.jit(do_not_specialize=["max_drafts"])
def compress_state(
    starts,
    slots,
    accepted,
    drafts,
    save_starts,
    save_after,
    save_slots,
    positions,
    x,
    kept,
    state,
    stride,
    max_drafts,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last SPAN tokens of a sequence, for its snapshots and its slot. Grid: block of columns, position modulo SPAN,
    sequence."""
    sequence = tl.program_id(2)
    place = tl.program_id(1)
    slot, start, before, total, saved = sequence_inputs(starts, slots, accepted, drafts, sequence)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < tl.where(total > 0, WIDTH, 0)
    first = tl.load(positions + start, mask=total > 0, other=0).to(tl.int32)
    target = state + place * WIDTH + columns
    first_save = tl.load(save_starts + sequence)
    saves = tl.load(save_starts + sequence + 1) - first_save
    for save in range(saves + 1):  # the slot itself is last, since the others are made from its old tokens
        is_snapshot = save < saves
        end = tl.where(is_snapshot, tl.load(save_after + first_save + save, mask=is_snapshot, other=0), saved - before)
        to = tl.load(save_slots + first_save + save, mask=is_snapshot, other=0).to(tl.int64)
        last = first + end - 1
        at = last - (last - place + SPAN) % SPAN  # the last position of this place
        known = columns < tl.where((total > 0) & (at >= 0), WIDTH, 0)
        token = token_of_entry(
            at, columns, known, first, before, start, slot, x, kept, state, stride, max_drafts, WIDTH, SPAN
        )
        tl.store(target + tl.where(is_snapshot, to, slot) * SPAN * WIDTH, token, mask=inside)


@triton.jit
def rotate_tail(
    x,
    positions,
    table,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate the last ``2 * HALF`` elements of a block of heads in place. Grid: token, block of heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None]
    pairs = x + (token * HEADS + heads)[:, None] * DIM + DIM - 2 * HALF + 2 * columns[None]
    even = tl.load(pairs, mask=inside, other=0.0)
    odd = tl.load(pairs + 1, mask=inside, other=0.0)
    angles = table + tl.maximum(tl.load(positions + token), 0) * 2 * HALF + columns  # padding may have any position
    cos = tl.load(angles, mask=columns < HALF, other=0.0)[None]
    sin = tl.load(angles + HALF, mask=columns < HALF, other=0.0)[None]
    if INVERSE:
        sin = -sin
    a, b = even.to(tl.float32), odd.to(tl.float32)
    tl.store(pairs, (a * cos - b * sin).to(even.dtype), mask=inside)
    tl.store(pairs + 1, (b * cos + a * sin).to(even.dtype), mask=inside)


@triton.jit
def hyper_weights(
    logits,
    base,
    scale,
    out,
    iterations,
    eps,
    STREAMS: tl.constexpr,
    COLLAPSE_ONLY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Weights of hyper-connections of a token. SIZE: number of streams, rounded up to a power of two."""
    WIDTH: tl.constexpr = STREAMS if COLLAPSE_ONLY else (2 + STREAMS) * STREAMS
    row = tl.program_id(0).to(tl.int64) * WIDTH
    each = tl.arange(0, SIZE)
    valid = each < STREAMS
    collapse = tl.load(logits + row + each, mask=valid, other=0.0) * tl.load(scale)
    collapse += tl.load(base + each, mask=valid, other=0.0)
    tl.store(out + row + each, sigmoid(collapse) + eps, mask=valid)
    if not COLLAPSE_ONLY:
        at = STREAMS + each
        expand = tl.load(logits + row + at, mask=valid, other=0.0) * tl.load(scale + 1)
        expand += tl.load(base + at, mask=valid, other=0.0)
        tl.store(out + row + at, 2.0 * sigmoid(expand), mask=valid)
        both = valid[:, None] & valid[None]
        cells = 2 * STREAMS + each[:, None] * STREAMS + each[None]
        mix = tl.load(logits + row + cells, mask=both, other=0.0) * tl.load(scale + 2)
        mix += tl.load(base + cells, mask=both, other=0.0)
        mix = tl.where(both, mix, float("-inf"))
        mix = tl.where(both, tl.exp(mix - tl.max(tl.where(valid[:, None], mix, 0.0), 1)[:, None]), 0.0)
        mix = tl.where(both, mix / tl.where(valid, tl.sum(mix, 1), 1.0)[:, None] + eps, 0.0)
        mix = mix / (tl.sum(mix, 0) + eps)[None]
        for _ in range(iterations - 1):
            mix = mix / (tl.sum(mix, 1) + eps)[:, None]
            mix = mix / (tl.sum(mix, 0) + eps)[None]
        tl.store(out + row + cells, mix, mask=both)


@triton.jit
def collapse_streams(x, weights, out, weights_stride, size, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Weighted sum of the residual streams. Grid: token, block of columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        part = tl.load(x + (token * STREAMS + stream) * size + columns, mask=columns < size, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + token * weights_stride + stream)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=columns < size)


@triton.jit
def mix_streams(
    x, residual, weights, weights_stride, size, STREAMS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Mix the residual streams in place, and add the weighted output of a layer. Grid: token, block of columns. SIZE:
    number of streams, rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    streams = tl.arange(0, SIZE)
    added = tl.load(x + token * size + columns, mask=columns < size, other=0.0).to(tl.float32)
    row = weights + token * weights_stride + STREAMS
    expand = tl.load(row + streams, mask=streams < STREAMS, other=0.0)
    mixed = expand[:, None] * added[None]
    for stream in tl.static_range(STREAMS):
        old = tl.load(residual + (token * STREAMS + stream) * size + columns, mask=columns < size, other=0.0)
        mix = tl.load(row + STREAMS + stream * STREAMS + streams, mask=streams < STREAMS, other=0.0)
        mixed += mix[:, None] * old.to(tl.float32)[None]
    target = residual + (token * STREAMS + streams)[:, None] * size + columns[None]
    stored = (streams < STREAMS)[:, None] & (columns < size)[None]
    tl.debug_barrier()  # waits until all threads have read the old streams
    tl.store(target, mixed.to(residual.dtype.element_ty), mask=stored)
