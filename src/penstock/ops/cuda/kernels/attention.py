"""Kernels of attention over the paged KV cache: a plan of the work, attention, and the reduction of split sequences.

The bits of a query depend on its sequence alone. Positions are walked in tiles, and tiles are grouped in splits, both
at absolute positions. Each split has a maximum, a sum and an accumulator of its own, which are folded into those of the
splits before, from left to right: by the program that walks the splits, or, where a sequence's splits are spread over
programs, by the reduction. What a query does not see adds zeros, and leaves its maximum as it is, so that tiles in
which it sees nothing may be walked or not, as other queries need it.
"""

import triton
import triton.language as tl

from .elementwise import tanh

HEADER = tl.constexpr(4)
"""Integers of a plan before its arrays: items, splits an item, rows to reduce, and one unused."""
NOTHING = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def end_of(first_position, length, TOKENS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """The end of what queries of a tile see: their own positions, or without ``CAUSAL`` those after them, too, with a
    window as many as before them."""
    if CAUSAL:
        end = tl.minimum(first_position + TOKENS, length)
    elif WINDOW:
        end = tl.minimum(first_position + TOKENS + WINDOW - 1, length)
    else:
        end = length
    return end


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first position that a query sees: of its window, or of its chunk of as many positions."""
    return position // WINDOW * WINDOW if CHUNKED else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def splits_of(
    count, length, TOKENS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr = True
):
    """The largest number of splits in which queries of one tile of a sequence see something."""
    splits = (length + SPLIT - 1) // SPLIT
    if WINDOW:
        seen: tl.constexpr = WINDOW + TOKENS - 2 if CAUSAL else 2 * WINDOW + TOKENS - 3
        splits = tl.minimum(splits, seen // SPLIT + 2)
    return tl.where(count > 0, splits, 0)


@triton.jit
def sequences(query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK: tl.constexpr):
    """Queries, tiles of them, and splits of the sequences from ``first`` on."""
    at = first + tl.arange(0, BLOCK)
    inside = at < num_seqs
    start = tl.load(query_start_loc + at, mask=inside, other=0)
    count = tl.load(query_start_loc + at + 1, mask=inside, other=0) - start
    length = tl.load(seq_lens + at, mask=inside, other=0)
    return count, (count + TOKENS - 1) // TOKENS, splits_of(count, length, TOKENS, WINDOW, SPLIT, CAUSAL)


@triton.jit(do_not_specialize=["num_seqs", "capacity", "slots"])
def plan(
    query_start_loc,
    seq_lens,
    out,
    num_seqs,
    capacity,
    slots,
    HEAD_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The work items of a step, in one program.

    An item is one tile of queries with all its splits, or, of a sequence that is split, with some of them. A sequence
    is split where it has more than a program's fair share and its partial results fit in the workspace, which has room
    for ``capacity`` splits of a token; those with one tile of queries first, as they have no other way to be parallel.

    Args:
        out: ``[HEADER + 3 * num_seqs]`` int32. The arrays: the number of items up to each sequence's end, its first
            split in the workspace (-1: it is not split), and the number of split tokens up to its end.
        slots: items that there should be.
    """
    work = tl.zeros([], tl.int64)
    for first in range(0, num_seqs, BLOCK):
        _, tiles, splits = sequences(query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK)
        work += tl.sum((tiles * splits).to(tl.int64))
    share = tl.maximum(work * HEAD_TILES // slots, 1).to(tl.int32)

    small = tl.zeros([], tl.int32)
    for first in range(0, num_seqs, BLOCK):
        count, tiles, splits = sequences(
            query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK
        )
        needed = count * splits
        small += tl.sum(tl.where((splits > share) & (needed <= capacity) & (tiles == 1), needed, 0))

    large = small
    small, items, tokens = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, num_seqs, BLOCK):
        count, tiles, splits = sequences(
            query_start_loc, seq_lens, first, num_seqs, TOKENS, WINDOW, SPLIT, CAUSAL, BLOCK
        )
        needed = count * splits
        wanted = (splits > share) & (needed <= capacity)
        small_needed = tl.where(wanted & (tiles == 1), needed, 0)
        large_needed = tl.where(wanted & (tiles > 1), needed, 0)
        end = tl.where(tiles == 1, small + tl.cumsum(small_needed), large + tl.cumsum(large_needed))
        split = wanted & (end <= capacity)
        item_ends = items + tl.cumsum(tiles * tl.where(split, (splits + share - 1) // share, 1))
        token_ends = tokens + tl.cumsum(tl.where(split, count, 0))
        at = first + tl.arange(0, BLOCK)
        target = out + HEADER + at
        tl.store(target, item_ends, mask=at < num_seqs)
        tl.store(target + num_seqs, tl.where(split, end - needed, -1), mask=at < num_seqs)
        tl.store(target + 2 * num_seqs, token_ends, mask=at < num_seqs)
        small += tl.sum(small_needed)
        large += tl.sum(large_needed)
        items, tokens = tl.max(item_ends), tl.max(token_ends)
    tl.store(out, items * HEAD_TILES)
    tl.store(out + 1, share)
    tl.store(out + 2, tokens * HEAD_TILES)


@triton.jit
def sequence_of(ends, number, num_seqs):
    """The first sequence whose end is above ``number``, and the end of the one before."""
    low, high = tl.zeros([], tl.int32), num_seqs - 1
    while low < high:
        middle = (low + high) // 2
        after = tl.load(ends + middle) <= number
        low, high = tl.where(after, middle + 1, low), tl.where(after, high, middle)
    return low, tl.load(ends + low - 1, mask=low > 0, other=0)


@triton.jit
def sum_halves(x):
    """Sums of rows, whose size is a power of two, always in the same order, as ``sum_pairs`` has it: here columns that
    are far apart first, which one thread holds after a matrix product."""
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(x.reshape([x.shape[0], 2, x.shape[1] // 2]), 1)
    return x.reshape([x.shape[0]])


@triton.jit
def relative_to(largest):
    """What exponents are taken relative to: the maximum, or 0 where there is none, as infinities have no difference."""
    return tl.where(largest == NOTHING, 0.0, largest)


@triton.jit
def fold_weights(largest, split_largest):
    """The maximum of a split and those before, and what the sums and accumulators of each are multiplied with."""
    new = tl.maximum(largest, split_largest)
    relative = relative_to(new)
    return new, tl.exp2(largest - relative), tl.exp2(split_largest - relative)


@triton.jit
def fold(largest, total, acc, split_largest, split_total, split_acc):
    """A split's maximum, sum and accumulator folded into those of the splits before."""
    new, before, own = fold_weights(largest, split_largest)
    return new, total * before + split_total * own, acc * before[:, None] + split_acc * own[:, None]


@triton.jit
def inverse_of(total, largest, sinks, head, valid):
    """What accumulators are multiplied with in the end; rows that are no queries have seen nothing.

    Args:
        sinks: a score of each head that is added to the sum, and has no value; or None.
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=NOTHING) * LOG2_E
        total += tl.exp2(tl.minimum(sink - relative_to(largest), 100.0))
    return 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit
def end_split(
    acc, own, before, inverse, memory, out, loaded, stored, finished, first, SIZE: tl.constexpr, IN_MEMORY: tl.constexpr
):
    """Rows of a split's accumulator, folded into the splits before where these are in memory (``loaded``), and written
    there (``stored``) or, as a mean, to the output (``finished``).

    This is done for 32 columns at a time: threads exchange what they store in shared memory, and whole rows would take
    registers and memory that the loop around has no room for.
    """
    if acc.shape[1] > 32:
        low, high = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
        half: tl.constexpr = acc.shape[1] // 2
        end_split(low, own, before, inverse, memory, out, loaded, stored, finished, first, SIZE, IN_MEMORY)
        end_split(high, own, before, inverse, memory, out, loaded, stored, finished, first + half, SIZE, IN_MEMORY)
    else:
        columns = first + tl.arange(0, acc.shape[1])
        inside = (columns < SIZE)[None]
        if IN_MEMORY:
            all_acc = tl.load(memory[:, None] + columns[None], mask=loaded[:, None] & inside, other=0.0)
            acc = all_acc * before[:, None] + acc * own[:, None]
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
    """Attention of the items of a plan, which programs take in turn.

    A row of a tile is a query head of a token: ``ROWS // GROUP_TILE`` tokens, and for each ``GROUP_TILE`` of the
    ``GROUP`` heads that share keys and values.

    Args:
        scale: of scores, for exponents of two; with CAP, of what the hyperbolic tangent is taken of.
        sinks: as of ``inverse_of``.
        partial, partial_sums: accumulators, ``[rows, HEAD_DIM]``, and maxima and sums, ``[rows, 2]``. First those of
            split sequences, where a row is a split of a token, for each head; from ``first_row`` on, ``ROWS`` for each
            program.
        IN_MEMORY: keep what was folded so far in these rows of the program, not in registers: for tiles with few
            queries, that costs nothing, and leaves registers for two programs on a multiprocessor.
        CAP: of scores, for exponents of two; 0 is none.
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
        # Every other turn in reverse, as items of long sequences' ends come before those of their beginnings.
        program = tl.program_id(0)
        item = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
        if item < items:
            kv_head = item % (KV_HEADS * HEAD_TILES) // HEAD_TILES
            first_head = item % HEAD_TILES * GROUP_TILE
            number = item // (KV_HEADS * HEAD_TILES)
            sequence, first_item = sequence_of(plan + 4, number, num_seqs)
            start = tl.load(query_start_loc + sequence)
            count = tl.load(query_start_loc + sequence + 1) - start
            length = tl.load(seq_lens + sequence)
            place = tl.load(plan + 4 + num_seqs + sequence)
            splits = splits_of(count, length, TOKENS, WINDOW, SPLIT, CAUSAL)
            chunks = tl.where(place >= 0, (splits + share - 1) // share, 1)
            number -= first_item
            # The last queries, which see most, come first, so that programs end together.
            first_token = ((count + TOKENS - 1) // TOKENS - 1 - number // chunks) * TOKENS
            first_position = length - count + first_token
            end_position = end_of(first_position, length, TOKENS, WINDOW, CAUSAL)
            seen_from = first_seen(first_position, WINDOW, CHUNKED) if WINDOW else 0
            first_split = seen_from // SPLIT
            chunk_split = first_split + number % chunks * share
            begin = tl.maximum(seen_from, chunk_split * SPLIT) // TILE
            end = (end_position + TILE - 1) // TILE
            if place >= 0:
                end = tl.minimum(end, (chunk_split + share) * (SPLIT // TILE))

            token = first_token + rows // GROUP_TILE
            head = first_head + rows % GROUP_TILE
            valid = (rows < TOKENS * GROUP_TILE) & (token < count) & (head < GROUP)
            head += kv_head * GROUP
            position = (length - count + token)[:, None]
            query = q + (start + token).to(tl.int64) * q_stride + head * HEAD_DIM
            queries = tl.load(query[:, None] + dims[None], mask=valid[:, None] & (dims < HEAD_DIM)[None], other=0.0)
            table = block_tables + sequence.to(tl.int64) * table_stride
            partial_row = (place + token * splits) * (KV_HEADS * GROUP) + head

            largest = tl.full([ROWS], NOTHING, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)
            if not IN_MEMORY:
                all_largest, all_total, all_acc = largest, total, acc
            target = out + (start + token).to(tl.int64) * out_stride + head * HEAD_DIM
            # Tiles that all queries see whole.
            seen_whole_to = end_of(first_position, length, 1, WINDOW, CAUSAL) // TILE
            last_position = tl.minimum(first_position + TOKENS, length)
            seen_whole_from = (first_seen(last_position - 1, WINDOW, CHUNKED) + TILE - 1) // TILE if WINDOW else 0
            for tile in tl.range(begin, end):
                at = tile * TILE + columns
                # What no query sees may be no numbers: keys are masked as scores, values as they are read.
                seen = (at >= seen_from) & (at < end_position)
                if PAGE % TILE == 0:  # a block has the whole tile: one address, and offsets that never change
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
                    k, v = tl.load(key), tl.load(value, mask=seen[:, None], other=0.0)
                else:
                    k = tl.load(key, mask=(dims < HEAD_DIM)[None], other=0.0)
                    v = tl.load(value, mask=seen[:, None] & (dims < HEAD_DIM)[None], other=0.0)
                scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision="ieee")
                if QUANTIZED:
                    value_scale = tl.load(key_scale + KV_HEADS * PAGE, mask=seen, other=0.0)
                    scores *= (tl.load(key_scale) * scale)[None]
                else:
                    scores *= scale
                if CAP > 0:
                    scores = tanh(scores) * CAP
                if (tile < seen_whole_from) | (tile >= seen_whole_to):
                    visible = at[None] <= position if CAUSAL else at[None] < end_position
                    if WINDOW and not CAUSAL:
                        visible &= at[None] < position + WINDOW
                    if WINDOW:
                        visible &= at[None] >= first_seen(position, WINDOW, CHUNKED)
                    scores = tl.where(visible, scores, NOTHING)
                new = tl.maximum(largest, tl.max(scores, 1))
                relative = relative_to(new)
                weights = tl.exp2(scores - relative[:, None])
                before = tl.exp2(largest - relative)
                total = total * before + sum_halves(weights)
                largest = new
                if QUANTIZED:
                    weights *= value_scale[None]
                acc *= before[:, None]
                acc = tl.dot(weights.to(queries.dtype), v.to(queries.dtype), acc, input_precision="ieee")
                if ((tile + 1) % (SPLIT // TILE) == 0) | (tile + 1 == end):
                    row = partial_row + (tile // (SPLIT // TILE) - first_split) * (KV_HEADS * GROUP)
                    split = place >= 0
                    if IN_MEMORY:
                        row = tl.where(split, row, first_row + program * ROWS + rows)
                        is_first = tile * TILE // SPLIT == begin * TILE // SPLIT
                        loaded = valid & (rows < tl.where(split | is_first, 0, ROWS))
                        finished = valid & (rows < tl.where(split | (tile + 1 < end), 0, ROWS))
                        stored = valid & (rows < tl.where(split | (tile + 1 < end), ROWS, 0))
                        all_largest = tl.load(partial_sums + row * 2, mask=loaded, other=NOTHING)
                        all_total = tl.load(partial_sums + row * 2 + 1, mask=loaded, other=0.0)
                        new, before, own = fold_weights(all_largest, largest)
                        total = all_total * before + total * own
                        inverse = inverse_of(total, new, sinks, head, valid)
                        end_split(
                            acc, own, before, inverse, partial + row * HEAD_DIM, target,
                            loaded, stored, finished, 0, HEAD_DIM, True,
                        )  # fmt: skip
                        tl.store(partial_sums + row * 2, new, mask=stored)
                        tl.store(partial_sums + row * 2 + 1, total, mask=stored)
                    elif split:
                        end_split(
                            acc, total, total, total, partial + row * HEAD_DIM, target,
                            valid, valid, valid, 0, HEAD_DIM, False,
                        )  # fmt: skip
                        tl.store(partial_sums + row * 2, largest, mask=valid)
                        tl.store(partial_sums + row * 2 + 1, total, mask=valid)
                    else:
                        all_largest, all_total, all_acc = fold(all_largest, all_total, all_acc, largest, total, acc)
                    largest = tl.full([ROWS], NOTHING, tl.float32)
                    total = tl.zeros([ROWS], tl.float32)
                    acc = tl.zeros([ROWS, DIM], tl.float32)
            if not IN_MEMORY:
                inverse = inverse_of(all_total, all_largest, sinks, head, valid)
                mean = (all_acc * inverse[:, None]).to(queries.dtype)
                here = valid & (rows < tl.where(place < 0, ROWS, 0))
                tl.store(target[:, None] + dims[None], mean, mask=here[:, None] & (dims < HEAD_DIM)[None])


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
    """Folds the partial results of split sequences: items are ``GROUP_TILE`` heads of a token."""
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    TOKENS: tl.constexpr = ROWS // GROUP_TILE
    rows = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    for item in range(tl.program_id(0), tl.load(plan + 2), tl.num_programs(0)):
        number = item // (KV_HEADS * HEAD_TILES)
        sequence, first = sequence_of(plan + 4 + 2 * num_seqs, number, num_seqs)
        token = number - first
        start = tl.load(query_start_loc + sequence)
        count = tl.load(query_start_loc + sequence + 1) - start
        length = tl.load(seq_lens + sequence)
        place = tl.load(plan + 4 + num_seqs + sequence)
        splits = splits_of(count, length, TOKENS, WINDOW, SPLIT, CAUSAL)
        # As in attention: of the tile that has the token.
        first_position = length - count + token // TOKENS * TOKENS
        end_position = end_of(first_position, length, TOKENS, WINDOW, CAUSAL)
        first_split = first_seen(first_position, WINDOW, CHUNKED) // SPLIT if WINDOW else 0
        parts = (end_position + SPLIT - 1) // SPLIT - first_split

        head = item % HEAD_TILES * GROUP_TILE + rows
        valid = (rows < GROUP_TILE) & (head < GROUP)
        head += item % (KV_HEADS * HEAD_TILES) // HEAD_TILES * GROUP
        inside = valid[:, None] & (dims < HEAD_DIM)[None]
        row = (place + token * splits) * (KV_HEADS * GROUP) + head
        largest = tl.full([HEADS], NOTHING, tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIM], tl.float32)
        for part in tl.range(0, parts, num_stages=STAGES):
            at = row + part * (KV_HEADS * GROUP)
            part_largest = tl.load(partial_sums + at * 2, mask=valid, other=NOTHING)
            part_total = tl.load(partial_sums + at * 2 + 1, mask=valid, other=0.0)
            part_acc = tl.load(partial + (at * HEAD_DIM)[:, None] + dims[None], mask=inside, other=0.0)
            largest, total, acc = fold(largest, total, acc, part_largest, part_total, part_acc)
        target = out + (start + token).to(tl.int64) * out_stride + head * HEAD_DIM
        mean = acc * inverse_of(total, largest, sinks, head, valid)[:, None]
        tl.store(target[:, None] + dims[None], mean.to(out.dtype.element_ty), mask=inside)
