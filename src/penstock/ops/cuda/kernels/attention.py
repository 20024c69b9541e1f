"""Kernels of attention over the paged KV cache: a plan of the work, attention, and the reduction of split sequences.

The bits of a query depend only on its sequence. Positions are processed in tiles, and tiles are grouped in splits, both
at absolute positions. Each split has a separate maximum, sum and accumulator, which are merged with the results of the
previous splits in order: by the program that processes the splits, or, if the splits of a sequence are divided among
programs, by the reduction. Masked positions add zeros and do not change the maximum. Therefore it does not matter for a
query if tiles without a visible position are processed, because other queries need them.
"""

import triton
import triton.language as tl

from .elementwise import tanh

HEADER = tl.constexpr(4)
"""Number of integers of a plan before its arrays: number of items, splits per item, rows to reduce, and an unused
integer."""
NEG_INF = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def visible_end(first_position, length, TOKENS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """End of the positions to which queries of a tile attend: with ``CAUSAL`` the end of the queries' positions,
    otherwise the end of the sequence, or of the window of ``WINDOW - 1`` positions after a query."""
    if CAUSAL:
        end = tl.minimum(first_position + TOKENS, length)
    elif WINDOW:
        end = tl.minimum(first_position + TOKENS + WINDOW - 1, length)
    else:
        end = length
    return end


@triton.jit
def visible_start(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """First position to which a query attends: the start of its window, or with CHUNKED of its chunk of WINDOW
    positions."""
    return position // WINDOW * WINDOW if CHUNKED else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def num_splits(
    count, length, TOKENS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr = True
):
    """Maximum number of splits to which the queries of one tile of a sequence attend."""
    splits = (length + SPLIT - 1) // SPLIT
    if WINDOW:
        visible: tl.constexpr = WINDOW + TOKENS - 2 if CAUSAL else 2 * WINDOW + TOKENS - 3
        splits = tl.minimum(splits, visible // SPLIT + 2)
    return tl.where(count > 0, splits, 0)


@triton.jit
def load_seqs(query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK: tl.constexpr):
    """Loads the numbers of queries, tiles of queries, and splits of ``BLOCK`` sequences from number ``first`` on."""
    at = first + tl.arange(0, BLOCK)
    inside = at < num_seqs
    start = tl.load(query_start_loc + at, mask=inside, other=0)
    count = tl.load(query_start_loc + at + 1, mask=inside, other=0) - start
    length = tl.load(seq_lens + at, mask=inside, other=0)
    return count, (count + TOKENS - 1) // TOKENS, num_splits(count, length, TOKENS, WINDOW, SPLIT, CAUSAL)


@triton.jit(do_not_specialize=["num_seqs", "capacity", "target_items"])
def plan(
    query_start_loc,
    seq_lens,
    out,
    num_seqs,
    capacity,
    target_items,
    HEAD_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Plans the work items of a step, in one program.

    An item is one tile of queries with all its splits or, for a split sequence, with some of its splits. A sequence is
    split if it has more splits than the fair share of a program, and its partial results fit into the workspace, which
    can hold ``capacity`` splits of a token. Sequences with one tile of queries have priority, since they have no other
    parallelism.

    Args:
        out: ``[HEADER + 3 * num_seqs]`` int32: the header, then three arrays with an entry per sequence: the number of
            items up to its end, its first split in the workspace (-1: not split), and the number of split tokens up to
            its end.
        target_items: desired number of items.
    """
    work = tl.zeros([], tl.int64)
    for first in range(0, num_seqs, BLOCK):
        _, tiles, splits = load_seqs(query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK)
        work += tl.sum((tiles * splits).to(tl.int64))
    share = tl.maximum(work * HEAD_TILES // target_items, 1).to(tl.int32)

    small = tl.zeros([], tl.int32)
    for first in range(0, num_seqs, BLOCK):
        count, tiles, splits = load_seqs(
            query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK
        )
        num_partials = count * splits
        small += tl.sum(tl.where((splits > share) & (num_partials <= capacity) & (tiles == 1), num_partials, 0))

    large = small
    small, items, tokens = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, num_seqs, BLOCK):
        count, tiles, splits = load_seqs(
            query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK
        )
        num_partials = count * splits
        is_split_candidate = (splits > share) & (num_partials <= capacity)
        small_needed = tl.where(is_split_candidate & (tiles == 1), num_partials, 0)
        large_needed = tl.where(is_split_candidate & (tiles > 1), num_partials, 0)
        end = tl.where(tiles == 1, small + tl.cumsum(small_needed), large + tl.cumsum(large_needed))
        split = is_split_candidate & (end <= capacity)
        item_ends = items + tl.cumsum(tiles * tl.where(split, (splits + share - 1) // share, 1))
        token_ends = tokens + tl.cumsum(tl.where(split, count, 0))
        at = first + tl.arange(0, BLOCK)
        target = out + HEADER + at
        tl.store(target, item_ends, mask=at < num_seqs)
        tl.store(target + num_seqs, tl.where(split, end - num_partials, -1), mask=at < num_seqs)
        tl.store(target + 2 * num_seqs, token_ends, mask=at < num_seqs)
        small += tl.sum(small_needed)
        large += tl.sum(large_needed)
        items, tokens = tl.max(item_ends), tl.max(token_ends)
    tl.store(out, items * HEAD_TILES)
    tl.store(out + 1, share)
    tl.store(out + 2, tokens * HEAD_TILES)


@triton.jit
def find_sequence(ends, number, num_seqs):
    """Binary search of the first sequence with an end above ``number``. Returns this sequence and the end of the
    previous one."""
    low, high = tl.zeros([], tl.int32), num_seqs - 1
    while low < high:
        middle = (low + high) // 2
        is_after = tl.load(ends + middle) <= number
        low, high = tl.where(is_after, middle + 1, low), tl.where(is_after, high, middle)
    return low, tl.load(ends + low - 1, mask=low > 0, other=0)


@triton.jit
def sum_halves(x):
    """Sum rows in a fixed order, like ``sum_pairs``. The size of a row is a power of two. Distant columns are added
    first: after a matrix product, they are in the same thread."""
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(x.reshape([x.shape[0], 2, x.shape[1] // 2]), 1)
    return x.reshape([x.shape[0]])


@triton.jit
def finite_max(largest):
    """Value to subtract from exponents: the maximum, or 0 if the maximum is minus infinity (the difference of two
    infinities would be NaN)."""
    return tl.where(largest == NEG_INF, 0.0, largest)


@triton.jit
def merge_factors(largest, split_largest):
    """Returns the maximum of a split and the previous splits, and the factors for the sums and accumulators of the
    previous splits (``alpha``) and of the split (``beta``)."""
    new = tl.maximum(largest, split_largest)
    relative = finite_max(new)
    return new, tl.exp2(largest - relative), tl.exp2(split_largest - relative)


@triton.jit
def merge(largest, total, acc, split_largest, split_total, split_acc):
    """Merges the maximum, sum and accumulator of a split with the results of the previous splits."""
    new, alpha, beta = merge_factors(largest, split_largest)
    return new, total * alpha + split_total * beta, acc * alpha[:, None] + split_acc * beta[:, None]


@triton.jit
def inverse_sum(total, largest, sinks, head, valid):
    """Inverse of the sum of weights; 1 for padding rows, which have no weights.

    Args:
        sinks: sink logit of each head, or None.
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=NEG_INF) * LOG2_E
        total += tl.exp2(tl.minimum(sink - finite_max(largest), 100.0))
    return 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit
def finish_split(
    acc, beta, alpha, inverse, memory, out, loaded, stored, finished, first, SIZE: tl.constexpr, IN_MEMORY: tl.constexpr
):
    """Merges rows of a split's accumulator with the accumulator of the previous splits in ``memory`` (``loaded``).
    Writes the result to ``memory`` (``stored``), or normalized to the output (``finished``).

    The kernel does this for 32 columns at a time: threads exchange stored values through shared memory, and full rows
    would need too many registers and too much shared memory within the loop.
    """
    if acc.shape[1] > 32:
        low, high = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
        half: tl.constexpr = acc.shape[1] // 2
        finish_split(low, beta, alpha, inverse, memory, out, loaded, stored, finished, first, SIZE, IN_MEMORY)
        finish_split(high, beta, alpha, inverse, memory, out, loaded, stored, finished, first + half, SIZE, IN_MEMORY)
    else:
        columns = first + tl.arange(0, acc.shape[1])
        inside = (columns < SIZE)[None]
        if IN_MEMORY:
            all_acc = tl.load(memory[:, None] + columns[None], mask=loaded[:, None] & inside, other=0.0)
            acc = all_acc * alpha[:, None] + acc * beta[:, None]
            result = (acc * inverse[:, None]).to(out.dtype.element_ty)
            tl.store(out[:, None] + columns[None], result, mask=finished[:, None] & inside)
        tl.store(memory[:, None] + columns[None], acc, mask=stored[:, None] & inside)


@triton.jit(do_not_specialize=["num_seqs", "first_row", "table_stride"])
def attention(
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
    alibi,
    num_seqs,
    first_row,
    scale,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    scale_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNKED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    IN_MEMORY: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attention of the items of a plan, which are distributed over programs round-robin.

    A row of a tile is a query head of a token. A tile has ``ROWS // GROUP_TILE`` tokens, each with ``GROUP_TILE`` of
    the ``GROUP`` heads that share keys and values.

    Args:
        scale: softmax scale times log2(e); with CAP, the factor of scores before tanh.
        sinks: argument of ``inverse_sum``.
        alibi: ``AttentionOptions.alibi``.
        partial, partial_sums: accumulators, ``[rows, HEAD_DIM]``, and maxima and sums, ``[rows, 2]``. The first rows
            belong to split sequences, one per split of a token and head; from ``first_row`` on, each program has
            ``ROWS`` rows.
        IN_MEMORY: keep the merged results in the program's rows of ``partial`` instead of registers. For tiles with few
            queries, this costs no time, and leaves registers for two programs per multiprocessor.
        CAP: soft cap of the scores times log2(e); 0: off.
    """
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    TOKENS: tl.constexpr = ROWS // GROUP_TILE
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    tile_offsets = columns[:, None] * HEAD_DIM + dims[None]
    items, share = tl.load(plan), tl.load(plan + 1)
    programs = tl.num_programs(0)
    for turn in range(0, (items + programs - 1) // programs):
        # Odd turns assign items to programs in reverse order, which balances the load: the items of a sequence are
        # sorted from long to short.
        program = tl.program_id(0)
        item = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
        if item < items:
            kv_head = item % (KV_HEADS * HEAD_TILES) // HEAD_TILES
            first_head = item % HEAD_TILES * GROUP_TILE
            number = item // (KV_HEADS * HEAD_TILES)
            sequence, first_item = find_sequence(plan + 4, number, num_seqs)
            start = tl.load(query_start_loc + sequence)
            count = tl.load(query_start_loc + sequence + 1) - start
            length = tl.load(seq_lens + sequence)
            partial_start = tl.load(plan + 4 + num_seqs + sequence)
            splits = num_splits(count, length, TOKENS, WINDOW, SPLIT, CAUSAL)
            items_per_tile = tl.where(partial_start >= 0, (splits + share - 1) // share, 1)
            number -= first_item
            # The last queries, which attend to most positions, are processed first, so that programs end together.
            first_token = ((count + TOKENS - 1) // TOKENS - 1 - number // items_per_tile) * TOKENS
            first_position = length - count + first_token
            end_position = visible_end(first_position, length, TOKENS, WINDOW, CAUSAL)
            visible_from = visible_start(first_position, WINDOW, CHUNKED) if WINDOW else 0
            first_split = visible_from // SPLIT
            first_item_split = first_split + number % items_per_tile * share
            begin = tl.maximum(visible_from, first_item_split * SPLIT) // TILE
            end = (end_position + TILE - 1) // TILE
            if partial_start >= 0:
                end = tl.minimum(end, (first_item_split + share) * (SPLIT // TILE))

            token = first_token + rows // GROUP_TILE
            head = first_head + rows % GROUP_TILE
            valid = (rows < TOKENS * GROUP_TILE) & (token < count) & (head < GROUP)
            head += kv_head * GROUP
            position = (length - count + token)[:, None]
            query = q + (start + token).to(tl.int64) * q_stride + head * HEAD_DIM
            queries = tl.load(query[:, None] + dims[None], mask=valid[:, None] & (dims < HEAD_DIM)[None], other=0.0)
            slope = tl.load(alibi + head, mask=valid, other=0.0)[:, None] * LOG2_E if alibi is not None else None
            table = block_tables + sequence.to(tl.int64) * table_stride
            partial_row = (partial_start + token * splits) * (KV_HEADS * GROUP) + head

            largest = tl.full([ROWS], NEG_INF, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)
            if not IN_MEMORY:
                all_largest, all_total, all_acc = largest, total, acc
            target = out + (start + token).to(tl.int64) * out_stride + head * HEAD_DIM
            # Tiles from full_start to full_end are visible to all queries, and need no mask.
            full_end = visible_end(first_position, length, 1, WINDOW, CAUSAL) // TILE
            last_position = tl.minimum(first_position + TOKENS, length)
            full_start = (visible_start(last_position - 1, WINDOW, CHUNKED) + TILE - 1) // TILE if WINDOW else 0
            for tile in tl.range(begin, end):
                at = tile * TILE + columns
                # Positions to which no query attends may hold NaN: mask the scores, and the values when loading them.
                in_range = (at >= visible_from) & (at < end_position)
                if PAGE % TILE == 0:  # a block contains the tile: one address and constant offsets
                    block = tl.load(table + tile * TILE // PAGE).to(tl.int64)
                    inner = kv_head * PAGE + tile * TILE % PAGE
                    key = values + block * block_stride + inner * HEAD_DIM + tile_offsets
                    key_scale = scales + block * scale_stride + inner + columns if QUANTIZED else None
                else:
                    block = tl.load(table + at // PAGE, mask=at < end_position, other=0).to(tl.int64)
                    inner = kv_head * PAGE + at % PAGE
                    key = values + (block * block_stride + inner * HEAD_DIM)[:, None] + dims[None]
                    key_scale = scales + block * scale_stride + inner if QUANTIZED else None
                value = key + KV_HEADS * PAGE * HEAD_DIM
                if DIM == HEAD_DIM:
                    k, v = tl.load(key), tl.load(value, mask=in_range[:, None], other=0.0)
                else:
                    k = tl.load(key, mask=(dims < HEAD_DIM)[None], other=0.0)
                    v = tl.load(value, mask=in_range[:, None] & (dims < HEAD_DIM)[None], other=0.0)
                scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision="ieee")
                if QUANTIZED:
                    value_scale = tl.load(key_scale + KV_HEADS * PAGE, mask=in_range, other=0.0)
                    scores *= (tl.load(key_scale) * scale)[None]
                else:
                    scores *= scale
                if CAP > 0:
                    scores = tanh(scores) * CAP
                if alibi is not None:
                    scores += slope * (at[None] - position).to(tl.float32)
                if (tile < full_start) | (tile >= full_end):
                    visible = at[None] <= position if CAUSAL else at[None] < end_position
                    if WINDOW and not CAUSAL:
                        visible &= at[None] < position + WINDOW
                    if WINDOW:
                        visible &= at[None] >= visible_start(position, WINDOW, CHUNKED)
                    scores = tl.where(visible, scores, NEG_INF)
                new = tl.maximum(largest, tl.max(scores, 1))
                relative = finite_max(new)
                weights = tl.exp2(scores - relative[:, None])
                alpha = tl.exp2(largest - relative)
                total = total * alpha + sum_halves(weights)
                largest = new
                if QUANTIZED:
                    weights *= value_scale[None]
                acc *= alpha[:, None]
                acc = tl.dot(weights.to(queries.dtype), v.to(queries.dtype), acc, input_precision="ieee")
                if ((tile + 1) % (SPLIT // TILE) == 0) | (tile + 1 == end):
                    row = partial_row + (tile // (SPLIT // TILE) - first_split) * (KV_HEADS * GROUP)
                    split = partial_start >= 0
                    if IN_MEMORY:
                        row = tl.where(split, row, first_row + program * ROWS + rows)
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
                            acc, beta, alpha, inverse, partial + row * HEAD_DIM, target,
                            loaded, stored, finished, 0, HEAD_DIM, True,
                        )  # fmt: skip
                        tl.store(partial_sums + row * 2, new, mask=stored)
                        tl.store(partial_sums + row * 2 + 1, total, mask=stored)
                    elif split:
                        finish_split(
                            acc, total, total, total, partial + row * HEAD_DIM, target,
                            valid, valid, valid, 0, HEAD_DIM, False,
                        )  # fmt: skip
                        tl.store(partial_sums + row * 2, largest, mask=valid)
                        tl.store(partial_sums + row * 2 + 1, total, mask=valid)
                    else:
                        all_largest, all_total, all_acc = merge(all_largest, all_total, all_acc, largest, total, acc)
                    largest = tl.full([ROWS], NEG_INF, tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    acc = tl.zeros([ROWS, DIM], tl.float32)
            if not IN_MEMORY:
                inverse = inverse_sum(all_total, all_largest, sinks, head, valid)
                mean = (all_acc * inverse[:, None]).to(queries.dtype)
                store_mask = valid & (rows < tl.where(partial_start < 0, ROWS, 0))
                tl.store(target[:, None] + dims[None], mean, mask=store_mask[:, None] & (dims < HEAD_DIM)[None])


@triton.jit(do_not_specialize=["num_seqs"])
def reduce(
    out,
    query_start_loc,
    seq_lens,
    plan,
    partial,
    partial_sums,
    sinks,
    num_seqs,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Merges the partial results of split sequences. An item is ``GROUP_TILE`` heads of a token."""
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    TOKENS: tl.constexpr = ROWS // GROUP_TILE
    rows = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    for item in range(tl.program_id(0), tl.load(plan + 2), tl.num_programs(0)):
        number = item // (KV_HEADS * HEAD_TILES)
        sequence, first = find_sequence(plan + 4 + 2 * num_seqs, number, num_seqs)
        token = number - first
        start = tl.load(query_start_loc + sequence)
        count = tl.load(query_start_loc + sequence + 1) - start
        length = tl.load(seq_lens + sequence)
        partial_start = tl.load(plan + 4 + num_seqs + sequence)
        splits = num_splits(count, length, TOKENS, WINDOW, SPLIT, CAUSAL)
        # The same range of splits as in attention, for the tile that contains the token.
        first_position = length - count + token // TOKENS * TOKENS
        end_position = visible_end(first_position, length, TOKENS, WINDOW, CAUSAL)
        first_split = visible_start(first_position, WINDOW, CHUNKED) // SPLIT if WINDOW else 0
        num_parts = (end_position + SPLIT - 1) // SPLIT - first_split

        head = item % HEAD_TILES * GROUP_TILE + rows
        valid = (rows < GROUP_TILE) & (head < GROUP)
        head += item % (KV_HEADS * HEAD_TILES) // HEAD_TILES * GROUP
        inside = valid[:, None] & (dims < HEAD_DIM)[None]
        row = (partial_start + token * splits) * (KV_HEADS * GROUP) + head
        largest = tl.full([HEADS], NEG_INF, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIM], tl.float32)
        for part in tl.range(0, num_parts, num_stages=STAGES):
            at = row + part * (KV_HEADS * GROUP)
            part_max = tl.load(partial_sums + at * 2, mask=valid, other=NEG_INF)
            part_sum = tl.load(partial_sums + at * 2 + 1, mask=valid, other=0.0)
            part_acc = tl.load(partial + (at * HEAD_DIM)[:, None] + dims[None], mask=inside, other=0.0)
            largest, total, acc = merge(largest, total, acc, part_max, part_sum, part_acc)
        target = out + (start + token).to(tl.int64) * out_stride + head * HEAD_DIM
        mean = acc * inverse_sum(total, largest, sinks, head, valid)[:, None]
        tl.store(target[:, None] + dims[None], mean.to(out.dtype.element_ty), mask=inside)
