"""Kernels of sparse attention (DeepSeek-V3.2): scores of positions, and selection of the largest scores.

A layer's cache is ``[blocks, 1, 1, block_size, ROW]``; the last ``INDEX`` elements of a token's vector are its index
key.
"""

import triton
import triton.language as tl

from .attention import find_sequence


@triton.jit
def sequence_of(token, query_start_loc, seq_lens, num_seqs):
    """The sequence of a query, and the number of positions up to the query's: 0 for padding."""
    sequence, _ = find_sequence(query_start_loc + 1, token, num_seqs)
    end = tl.load(query_start_loc + sequence + 1)
    positions = tl.load(seq_lens + sequence) - (end - token) + 1
    return sequence.to(tl.int64), tl.where(token < end, positions, 0)


@triton.jit(do_not_specialize=["first_token", "num_seqs", "table_stride", "score_stride"])
def index_scores(
    q,
    weights,
    values,
    block_tables,
    query_start_loc,
    seq_lens,
    scores,
    first_token,
    num_seqs,
    scale,
    score_stride,
    table_stride,
    block_stride,
    HEADS: tl.constexpr,
    INDEX: tl.constexpr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TOP_K: tl.constexpr,
    POSITIONS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Scores of a query and POSITIONS positions, unless the query selects all positions. Grid: query of the group,
    POSITIONS positions."""
    token = first_token + tl.program_id(0)
    begin = tl.program_id(1) * POSITIONS
    sequence, end = sequence_of(token, query_start_loc, seq_lens, num_seqs)
    if (end > TOP_K) & (begin < end):
        rows, columns, dims = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, DIM)
        heads = token.to(tl.int64) * HEADS + rows
        q_mask = (rows < HEADS)[:, None] & (dims < INDEX)[None]
        queries = tl.load(q + heads[:, None] * INDEX + dims[None], mask=q_mask, other=0.0)
        factors = tl.load(weights + heads, mask=rows < HEADS, other=0.0) * scale
        table = block_tables + sequence * table_stride
        target = scores + tl.program_id(0).to(tl.int64) * score_stride
        for first in range(begin, tl.minimum(begin + POSITIONS, end), TILE):
            at = first + columns
            mask = at < end
            block = tl.load(table + at // PAGE, mask=mask, other=0).to(tl.int64)
            key = values + (block * block_stride + at % PAGE * ROW + ROW - INDEX)[:, None]
            k = tl.load(key + dims[None], mask=mask[:, None] & (dims < INDEX)[None], other=0.0)
            products = tl.dot(queries, tl.trans(k), input_precision="ieee")
            weighted = tl.where(products > 0, products, 0.0) * factors[:, None]
            tl.store(target + at, tl.sum(weighted, 0), mask=mask)


@triton.jit
def order_of(score):
    """Integers, as int64, with the order of scores. Both zeros are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit(do_not_specialize=["first_token", "num_seqs", "table_stride", "score_stride"])
def select_keys(
    scores,
    block_tables,
    query_start_loc,
    seq_lens,
    slots,
    counts,
    first_token,
    num_seqs,
    score_stride,
    table_stride,
    PAGE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slots of the positions with the largest scores, in order of position. Finds the lowest selected score digit by
    digit (radix select). Grid: query of the group."""
    token = first_token + tl.program_id(0)
    sequence, end = sequence_of(token, query_start_loc, seq_lens, num_seqs)
    table = block_tables + sequence * table_stride
    target = slots + token.to(tl.int64) * TOP_K
    columns = tl.arange(0, BLOCK)
    tl.store(counts + token, tl.minimum(end, TOP_K))
    if end <= TOP_K:
        for first in range(0, end, BLOCK):
            at = first + columns
            block = tl.load(table + at // PAGE, mask=at < end, other=0)
            tl.store(target + at, block * PAGE + at % PAGE, mask=at < end)
    else:
        row = scores + tl.program_id(0).to(tl.int64) * score_stride
        digits = tl.arange(0, 256)
        threshold = tl.zeros([], tl.int64)
        remaining = tl.zeros([], tl.int32) + TOP_K  # to select of the scores whose higher digits are the threshold's
        for step in tl.static_range(4):
            shift = 24 - 8 * step
            found = tl.zeros([256], tl.int32)
            for first in range(0, end, BLOCK):
                at = first + columns
                order = order_of(tl.load(row + at, mask=at < end, other=0.0))
                same = (at < end) & ((order >> (shift + 8)) == (threshold >> (shift + 8)))
                found += tl.histogram(((order >> shift) & 255).to(tl.int32), 256, mask=same)
            at_least = tl.cumsum(found, 0, reverse=True)  # number of scores with this digit or a larger one
            digit = tl.sum((at_least >= remaining).to(tl.int32), 0) - 1
            remaining -= tl.sum(tl.where(digits == digit + 1, at_least, 0), 0)
            threshold += digit.to(tl.int64) << shift
        written = tl.zeros([], tl.int32)
        for first in range(0, end, BLOCK):
            at = first + columns
            order = order_of(tl.load(row + at, mask=at < end, other=0.0))
            equal = ((at < end) & (order == threshold)).to(tl.int32)
            chosen = (at < end) & ((order > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= remaining)))
            places = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
            block = tl.load(table + at // PAGE, mask=chosen, other=0)
            tl.store(target + places, block * PAGE + at % PAGE, mask=chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
            remaining -= tl.sum(equal, 0)
