"""Kernels of multi-head latent attention (MLA): products with a matrix per head, and attention over a latent cache.

A layer's cache is ``[blocks, 1, 1, block_size, head_dim]``. The vector of a token is the key of all heads; its first
``LATENT`` elements are also the value of all heads, its last elements the rotary part of the key.
"""

import triton
import triton.language as tl

from .attention import (
    NEG_INF,
    find_sequence,
    finish_split,
    finite_max,
    inverse_sum,
    merge_factors,
    num_splits,
    sum_halves,
)
from .kv_cache import MIN_MAGNITUDE, ROUND


@triton.jit(do_not_specialize=["tokens"])
def linear_by_head(
    x,
    weight,
    out,
    tokens,
    x_stride,
    x_head,
    out_stride,
    out_head,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Products of each head with its matrix in ``weight``, ``[heads, OUTPUTS, INPUTS]``. Grid: block of tokens, block
    of outputs, head."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    inputs = tl.arange(0, BLOCK)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride + head * x_head
    matrix = weight + (head * OUTPUTS + columns)[None] * INPUTS
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, INPUTS, BLOCK):
        at = first + inputs
        a = tl.load(x_rows + at[None], mask=(rows < tokens)[:, None] & (at < INPUTS)[None], other=0.0)
        b = tl.load(matrix + at[:, None], mask=(columns < OUTPUTS)[None] & (at < INPUTS)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    target = out + rows.to(tl.int64)[:, None] * out_stride + head * out_head + columns[None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(rows < tokens)[:, None] & (columns < OUTPUTS)[None])


@triton.jit
def rotate_heads(x, table, position, heads, head_stride, HEADS, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, columns):
    """Rotates the rotary vectors of heads: halves, or adjacent elements (INTERLEAVED). Returns both parts ``[heads,
    columns]`` in the dtype of ``x``, their offsets within a head, and their mask."""
    first = columns * 2 if INTERLEAVED else columns
    second = first + 1 if INTERLEAVED else first + HALF
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None]
    x_heads = x + heads[:, None] * head_stride
    a = tl.load(x_heads + first[None], mask=inside, other=0.0)
    b = tl.load(x_heads + second[None], mask=inside, other=0.0)
    cos = tl.load(table + position * 2 * HALF + columns, mask=columns < HALF, other=0.0)[None]
    sin = tl.load(table + position * 2 * HALF + HALF + columns, mask=columns < HALF, other=0.0)[None]
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype), first, second, inside


@triton.jit
def latent_rope_and_store(
    q,
    k,
    latent,
    positions,
    table,
    values,
    scales,
    slot_mapping,
    out,
    index_keys,
    index_stride,
    q_stride,
    q_head,
    k_stride,
    latent_stride,
    out_stride,
    out_head,
    block_stride,
    scale_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    INDEX: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
):
    """Rotary embedding of queries and keys; stores the vectors of tokens. Grid: token, part (0: store the token's
    vector unless its slot is negative; 1, 2, …: rotate the queries of ROWS heads)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    position = tl.maximum(tl.load(positions + token), 0)  # padding may have any position
    columns = tl.arange(0, HALF_BLOCK)
    if part > 0:
        heads = (part - 1) * ROWS + tl.arange(0, ROWS)
        low, high, first_at, second_at, inside = rotate_heads(
            q + token * q_stride, table, position, heads, q_head, HEADS, HALF, INTERLEAVED, columns
        )
        queries = out + token * out_stride + heads[:, None] * out_head
        tl.store(queries + first_at[None], low, mask=inside)
        tl.store(queries + second_at[None], high, mask=inside)
    else:
        one = tl.arange(0, 1)
        key = k + token * k_stride
        a, b, first, second, _ = rotate_heads(key, table, position, one, 0, 1, HALF, INTERLEAVED, columns)
        dims = tl.arange(0, DIM)[None]
        vector = tl.load(latent + token * latent_stride + dims, mask=dims < LATENT, other=0.0)
        if QUANTIZATION != "":
            a, b, vector = a.to(tl.float32), b.to(tl.float32), vector.to(tl.float32)
            limit: tl.constexpr = 127.0 if QUANTIZATION == "int8" else 448.0
            maximum = tl.maximum(tl.maximum(tl.max(tl.abs(a)), tl.max(tl.abs(b))), tl.max(tl.abs(vector)))
            limits = tl.zeros_like(maximum) + limit
            inverse = tl.where(maximum > MIN_MAGNITUDE, tl.div_rn(limits, maximum), 0.0)
            a, b, vector = a * inverse, b * inverse, vector * inverse
            if QUANTIZATION == "int8":
                a, b = ((a + ROUND) - ROUND).to(tl.int8), ((b + ROUND) - ROUND).to(tl.int8)
                vector = ((vector + ROUND) - ROUND).to(tl.int8)
            else:
                a = a.to(tl.float8e4nv, fp_downcast_rounding="rtne")
                b = b.to(tl.float8e4nv, fp_downcast_rounding="rtne")
                vector = vector.to(tl.float8e4nv, fp_downcast_rounding="rtne")
            scale_at = scales + slot // PAGE * scale_stride + slot % PAGE
            tl.store(scale_at, tl.div_rn(maximum, limits), mask=slot >= 0)
        target = values + slot // PAGE * block_stride + slot % PAGE * (LATENT + 2 * HALF + INDEX)
        stored = (columns < tl.where(slot >= 0, HALF, 0))[None]
        tl.store(target + dims, vector, mask=dims < tl.where(slot >= 0, LATENT, 0))
        tl.store(target + LATENT + first[None], a, mask=stored)
        tl.store(target + LATENT + second[None], b, mask=stored)
        if INDEX > 0 and index_keys is not None:
            indices = tl.arange(0, INDEX_BLOCK)
            index_key = tl.load(index_keys + token * index_stride + indices, mask=indices < INDEX, other=0.0)
            tl.store(
                target + LATENT + 2 * HALF + indices[None],
                index_key[None],
                mask=(indices < tl.where(slot >= 0, INDEX, 0))[None],
            )


@triton.jit(do_not_specialize=["num_seqs", "first_row", "table_stride"])
def latent_attention(
    q,
    out,
    values,
    scales,
    block_tables,
    query_start_loc,
    seq_lens,
    plan,
    partial,
    partial_sums,
    sinks,
    num_seqs,
    first_row,
    scale,
    table_stride,
    block_stride,
    scale_stride,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    SELECTED: tl.constexpr,
    PARTS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """``attention.attention`` with ``IN_MEMORY`` for a latent cache. All heads share a key, and the value is the
    beginning of the key: a vector is read once for both products. ``ROW``: elements of a cached vector, perhaps with
    an index key. ``SELECTED``: the table holds slots of positions, instead of blocks, times ``PARTS``, the number of
    vectors of a slot, plus the number of the vector."""
    HEAD_TILES: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    TOKENS: tl.constexpr = ROWS // HEAD_TILE
    HEAD_DIM: tl.constexpr = LATENT + ROPE
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    rope_dims = tl.arange(0, ROPE_DIM)
    items, share = tl.load(plan), tl.load(plan + 1)
    programs = tl.num_programs(0)
    for turn in range(0, (items + programs - 1) // programs):
        program = tl.program_id(0)
        item = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
        if item < items:
            number = item // HEAD_TILES
            sequence, first_item = find_sequence(plan + 4, number, num_seqs)
            start = tl.load(query_start_loc + sequence)
            count = tl.load(query_start_loc + sequence + 1) - start
            length = tl.load(seq_lens + sequence)
            partial_start = tl.load(plan + 4 + num_seqs + sequence)
            splits = num_splits(count, length, TOKENS, 0, SPLIT)
            items_per_tile = tl.where(partial_start >= 0, (splits + share - 1) // share, 1)
            number -= first_item
            first_token = ((count + TOKENS - 1) // TOKENS - 1 - number // items_per_tile) * TOKENS
            first_position = length - count + first_token
            end_position = tl.minimum(first_position + TOKENS, length)
            begin = number % items_per_tile * share * (SPLIT // TILE)
            end = (end_position + TILE - 1) // TILE
            if partial_start >= 0:
                end = tl.minimum(end, begin + share * (SPLIT // TILE))

            token = first_token + rows // HEAD_TILE
            head = item % HEAD_TILES * HEAD_TILE + rows % HEAD_TILE
            valid = (rows < TOKENS * HEAD_TILE) & (token < count) & (head < HEADS)
            position = (length - count + token)[:, None]
            query = q + ((start + token).to(tl.int64) * HEADS + head) * HEAD_DIM
            latent_mask, rope_mask = valid[:, None] & (dims < LATENT)[None], valid[:, None] & (rope_dims < ROPE)[None]
            queries = tl.load(query[:, None] + dims[None], mask=latent_mask, other=0.0)
            if ROPE > 0:
                rope_queries = tl.load(query[:, None] + LATENT + rope_dims[None], mask=rope_mask, other=0.0)
            table = block_tables + sequence.to(tl.int64) * table_stride
            partial_row = (partial_start + token * splits) * HEADS + head

            largest = tl.full([ROWS], NEG_INF, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)
            target = out + ((start + token).to(tl.int64) * HEADS + head) * LATENT
            for tile in tl.range(begin, end):
                at = tile * TILE + columns
                mask = at < end_position  # positions to which no query attends may hold NaN
                if SELECTED:
                    entry = tl.load(table + at, mask=mask, other=0)
                    slot, part = entry // PARTS, entry % PARTS * LATENT
                    block, offset = (slot // PAGE).to(tl.int64), slot % PAGE
                else:
                    block, offset, part = tl.load(table + at // PAGE, mask=mask, other=0).to(tl.int64), at % PAGE, 0
                key = values + (block * block_stride + offset * ROW + part)[:, None]
                k = tl.load(key + dims[None], mask=mask[:, None] & (dims < LATENT)[None], other=0.0)
                k = k.to(queries.dtype)
                if ROPE > 0:
                    rope_k = tl.load(
                        key + LATENT + rope_dims[None], mask=mask[:, None] & (rope_dims < ROPE)[None], other=0.0
                    )
                    rope_k = rope_k.to(queries.dtype)
                scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
                if ROPE > 0:
                    scores = tl.dot(rope_queries, tl.trans(rope_k), scores, input_precision="ieee")
                if QUANTIZED:
                    key_scale = tl.load(scales + block * scale_stride + offset, mask=mask, other=0.0)
                    scores *= (key_scale * scale)[None]
                else:
                    scores *= scale
                scores = tl.where(at[None] <= position, scores, NEG_INF)
                new = tl.maximum(largest, tl.max(scores, 1))
                relative = finite_max(new)
                weights = tl.exp2(scores - relative[:, None])
                alpha = tl.exp2(largest - relative)
                total = total * alpha + sum_halves(weights)
                largest = new
                if QUANTIZED:
                    weights *= key_scale[None]
                acc *= alpha[:, None]
                acc = tl.dot(weights.to(queries.dtype), k, acc, input_precision="ieee")
                if ((tile + 1) % (SPLIT // TILE) == 0) | (tile + 1 == end):
                    split = partial_start >= 0
                    row = tl.where(
                        split, partial_row + tile // (SPLIT // TILE) * HEADS, first_row + program * ROWS + rows
                    )
                    is_first = tile * TILE // SPLIT == begin * TILE // SPLIT
                    loaded = valid & (rows < tl.where(split | is_first, 0, ROWS))
                    finished = valid & (rows < tl.where(split | (tile + 1 < end), 0, ROWS))
                    stored = valid & (rows < tl.where(split | (tile + 1 < end), ROWS, 0))
                    all_largest = tl.load(partial_sums + row * 2, mask=loaded, other=NEG_INF)
                    all_total = tl.load(partial_sums + row * 2 + 1, mask=loaded, other=0.0)
                    new, alpha, beta = merge_factors(all_largest, largest)
                    total = all_total * alpha + total * beta
                    inverse = inverse_sum(total, new, sinks, head, valid)
                    finish_split(
                        acc, beta, alpha, inverse, partial + row * LATENT, target,
                        loaded, stored, finished, 0, LATENT, True,
                    )  # fmt: skip
                    tl.store(partial_sums + row * 2, new, mask=stored)
                    tl.store(partial_sums + row * 2 + 1, total, mask=stored)
                    largest = tl.full([ROWS], NEG_INF, tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    acc = tl.zeros([ROWS, DIM], tl.float32)
