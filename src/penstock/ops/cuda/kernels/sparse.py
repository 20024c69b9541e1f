"""Kernels of sparse attention (DeepSeek-V3.2) and compressed attention (DeepSeek-V4): scores of candidates, and
selection of the largest scores. Candidates are all positions, or the last positions of entries of RATE tokens.

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
    RATE: tl.constexpr,
    POSITIONS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Scores of a query and POSITIONS candidates, unless the query selects all of them. Grid: query of the group,
    POSITIONS candidates."""
    token = first_token + tl.program_id(0)
    begin = tl.program_id(1) * POSITIONS
    sequence, end = sequence_of(token, query_start_loc, seq_lens, num_seqs)
    end = end // RATE
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
            position = at * RATE + RATE - 1
            block = tl.load(table + position // PAGE, mask=mask, other=0).to(tl.int64)
            key = values + (block * block_stride + position % PAGE * ROW + ROW - INDEX)[:, None]
            k = tl.load(key + dims[None], mask=mask[:, None] & (dims < INDEX)[None], other=0.0)
            products = tl.dot(queries, tl.trans(k), input_precision="ieee")
            weighted = tl.where(products > 0, products, 0.0) * factors[:, None]
            tl.store(target + at, tl.sum(weighted, 0), mask=mask)


@triton.jit
def order_of(score):
    """Integers, as int64, with the order of scores. Both zeros are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def slots_at(table, positions, mask, PAGE: tl.constexpr, PARTS: tl.constexpr):
    """Slots of positions, times PARTS."""
    block = tl.load(table + positions // PAGE, mask=mask, other=0)
    return (block * PAGE + positions % PAGE) * PARTS


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
    WINDOW: tl.constexpr,
    RATE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slots of the last WINDOW positions, and of the candidates with the largest scores, in order of position. Finds
    the lowest selected score digit by digit (radix select). RATE 0: no candidates. Grid: query of the group."""
    token = first_token + tl.program_id(0)
    sequence, length = sequence_of(token, query_start_loc, seq_lens, num_seqs)
    table = block_tables + sequence * table_stride
    target = slots + token.to(tl.int64) * (WINDOW + TOP_K)
    columns = tl.arange(0, BLOCK)
    if WINDOW > 0:
        in_window = tl.minimum(length, WINDOW)
        for first in range(0, in_window, BLOCK):
            at = first + columns
            found = slots_at(table, length - in_window + at, at < in_window, PAGE, PARTS)
            tl.store(target + at, found, mask=at < in_window)
        target += in_window
    else:
        in_window = 0
    end = length // RATE if RATE > 0 else 0
    tl.store(counts + token, in_window + tl.minimum(end, TOP_K))
    if end <= TOP_K:
        for first in range(0, end, BLOCK):
            at = first + columns
            found = slots_at(table, at * RATE + RATE - 1, at < end, PAGE, PARTS)
            tl.store(target + at, found + PARTS - 1, mask=at < end)
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
            tl.store(
                target + places, slots_at(table, at * RATE + RATE - 1, chosen, PAGE, PARTS) + PARTS - 1, mask=chosen
            )
            written += tl.sum(chosen.to(tl.int32), 0)
            remaining -= tl.sum(equal, 0)
