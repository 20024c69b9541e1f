"""Kernels of sampling: argmax, grammar bitmasks, and random sampling without a sort.

Weights of random sampling are float32 in [0, 1]; such numbers have the same order as their bits. Top-k and top-p keep
tokens with bits above ``edge``, and tokens with bits equal to ``edge`` and an id of at most ``last``.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(0x3F800000)
"""Bits of the largest weight, 1."""
FIRST_BOUNDS = tl.constexpr((1, 0x3A800000, 0x3D800000))
"""Initial bounds of a search: bits of the smallest weight, of 1/1024 and of 1/16."""


@triton.jit
def is_allowed(bitmask, columns, inside):
    """True for columns with a set bit in the row's bitmask."""
    bits = tl.load(bitmask + columns // 32, mask=inside, other=0)
    return ((bits >> (columns % 32)) & 1) != 0


@triton.jit
def apply_bitmask(logits, bitmask, columns_count, stride, bitmask_stride, BLOCK: tl.constexpr):
    """Sets forbidden logits to minus infinity. Grid: row, block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < columns_count
    forbidden = inside & (is_allowed(bitmask + row * bitmask_stride, columns, inside) == 0)
    tl.store(logits + row * stride + columns, tl.full((BLOCK,), float("-inf"), tl.float32), mask=forbidden)


@triton.jit
def first_of_largest(values, indices):
    """Returns the largest value (NaN if a value is NaN), and its lowest index."""
    is_nan = values != values
    largest = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    if tl.max(is_nan.to(tl.int32), 0) != 0:
        largest = float("nan")
        found = tl.min(tl.where(is_nan, indices, 0x7FFFFFFF), 0)
    else:
        found = tl.min(tl.where(values == largest, indices, 0x7FFFFFFF), 0)
    return largest, found


@triton.jit
def argmax_blocks(logits, bitmask, values, indices, columns_count, stride, bitmask_stride, BLOCK: tl.constexpr):
    """Writes the largest logit of a block, and its column. Grid: row, block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < columns_count
    x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf"))
    if bitmask is not None:
        x = tl.where(is_allowed(bitmask + row * bitmask_stride, columns, inside), x, float("-inf"))
    largest, found = first_of_largest(x, columns)
    position = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + position, largest)
    tl.store(indices + position, found)


@triton.jit
def argmax_rows(values, indices, out_values, out_indices, blocks, BLOCKS: tl.constexpr):
    """Selects the largest result of a row's blocks. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    inside = at < blocks
    x = tl.load(values + row * blocks + at, mask=inside, other=float("-inf"))
    positions = tl.load(indices + row * blocks + at, mask=inside, other=0x7FFFFFFF)
    largest, found = first_of_largest(x, positions)
    tl.store(out_values + row, largest)
    tl.store(out_indices + row, found.to(tl.int64))


@triton.jit
def log_softmax(logits, out, columns_count, stride, BLOCK: tl.constexpr):
    """Log softmax. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, columns_count, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + columns, mask=columns < columns_count, other=float("-inf"))
        lanes = tl.maximum(lanes, x)
    largest = tl.max(lanes, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns_count, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + columns, mask=columns < columns_count, other=float("-inf"))
        sums += tl.exp(x - largest)
    log_sum = tl.log(tl.sum(sums, 0))
    for start in range(0, columns_count, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < columns_count
        x = tl.load(logits + row * stride + columns, mask=inside, other=0.0)
        tl.store(out + row * columns_count + columns, x - largest - log_sum, mask=inside)


@triton.jit(do_not_specialize=["count", "stride", "k"])
def topk(values, ids, out_values, out_ids, count, stride, k, BLOCK: tl.constexpr):
    """Selects the ``k`` largest values of a block; ties go to the lower id. Grid: row, block.

    Args:
        ids: ids of the values; None: their columns.
        out_values, out_ids: ``[rows, blocks, k]``. Missing entries have the maximum id.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    block_values = tl.load(values + row * stride + at, mask=inside, other=float("-inf"))
    block_ids = at
    if ids is not None:
        block_ids = tl.load(ids + row * stride + at, mask=inside, other=0x7FFFFFFF)
    block_ids = tl.where(inside, block_ids, 0x7FFFFFFF)
    position = (row * tl.num_programs(1) + tl.program_id(1)) * k
    for i in range(k):
        largest = tl.max(block_values, 0)
        found = tl.min(tl.where(block_values == largest, block_ids, 0x7FFFFFFF), 0)
        tl.store(out_values + position + i, largest)
        tl.store(out_ids + position + i, found)
        is_selected = block_ids == found
        block_values = tl.where(is_selected, float("-inf"), block_values)
        block_ids = tl.where(is_selected, 0x7FFFFFFF, block_ids)


# --- Random sampling --------------------------------------------------------------------------------------------------


@triton.jit
def load_entries(row, start, BLOCK: tl.constexpr):
    """Loads a block of a row's entries: entries of all tokens, or of the list written by ``list_entries``.

    Returns weights (0 for entries that are not kept), token ids, and the mask of entries.
    """
    logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last = row
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    if is_listed:
        weights = tl.load(listed_weights + at, mask=inside, other=0.0)
        token_ids = tl.load(listed_ids + at, mask=inside, other=0)
    else:
        x = tl.load(logits + at, mask=inside, other=float("-inf"))
        weights = tl.exp(tl.div_rn(x, temperature) - largest)
        weights = tl.where(weights < min_p, 0.0, weights)
        token_ids = at
    bits = weights.to(tl.int32, bitcast=True)
    is_kept = inside & ((bits > edge) | ((bits == edge) & (token_ids <= last)))
    return tl.where(is_kept, weights, 0.0), token_ids, inside


@triton.jit
def sum_by_4(x):
    """Sums of four adjacent elements; the four are in one thread."""
    return tl.sum(x.reshape(x.shape[0] // 4, 4), 1)


@triton.jit
def count_and_sum(row, low, middle, high, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts the entries of a row with bits of at least ``low``, ``middle`` and ``high``; with BY_MASS, also sums the
    entries in float64. Without BY_MASS, the returned sums are the counts."""
    counts0 = tl.zeros((BLOCK // 4,), tl.int32)
    counts1 = tl.zeros((BLOCK // 4,), tl.int32)
    counts2 = tl.zeros((BLOCK // 4,), tl.int32)
    sums0 = tl.zeros((BLOCK // 4,), tl.float64)
    sums1 = tl.zeros((BLOCK // 4,), tl.float64)
    sums2 = tl.zeros((BLOCK // 4,), tl.float64)
    for start in range(0, row[4], BLOCK):
        weights, _, _ = load_entries(row, start, BLOCK)
        bits = weights.to(tl.int32, bitcast=True)
        counts0 += sum_by_4((bits >= low).to(tl.int32))
        counts1 += sum_by_4((bits >= middle).to(tl.int32))
        counts2 += sum_by_4((bits >= high).to(tl.int32))
        if BY_MASS:
            sums0 += sum_by_4(tl.where(bits >= low, weights, 0.0).to(tl.float64))
            sums1 += sum_by_4(tl.where(bits >= middle, weights, 0.0).to(tl.float64))
            sums2 += sum_by_4(tl.where(bits >= high, weights, 0.0).to(tl.float64))
    count0, count1, count2 = tl.sum(counts0, 0), tl.sum(counts1, 0), tl.sum(counts2, 0)
    if BY_MASS:
        return count0, count1, count2, tl.sum(sums0, 0), tl.sum(sums1, 0), tl.sum(sums2, 0)
    else:
        return count0, count1, count2, count0.to(tl.float64), count1.to(tl.float64), count2.to(tl.float64)


@triton.jit
def list_entries(row, low, BLOCK: tl.constexpr):
    """Writes the entries of a row with bits of at least ``low`` to a list, in the order of token ids, so that later
    passes only read this list. Returns its length."""
    listed_weights, listed_ids = row[1], row[2]
    listed = 0
    for start in range(0, row[4], BLOCK):
        weights, token_ids, inside = load_entries(row, start, BLOCK)
        selected = (inside & (weights.to(tl.int32, bitcast=True) >= low)).to(tl.int32)
        positions = listed + tl.cumsum(selected, 0) - 1
        tl.store(listed_weights + positions, weights, mask=selected != 0)
        tl.store(listed_ids + positions, token_ids, mask=selected != 0)
        listed += tl.sum(selected, 0)
    tl.debug_barrier()  # waits for the list, since other threads read it
    return listed


@triton.jit
def nth_of_equal(row, edge, n, BLOCK: tl.constexpr):
    """Token id of the ``n``-th entry (counted from 1) with bits equal to ``edge``."""
    before = 0
    found = 0x7FFFFFFF
    for start in range(0, row[4], BLOCK):
        weights, token_ids, _ = load_entries(row, start, BLOCK)
        is_equal = (weights.to(tl.int32, bitcast=True) == edge).to(tl.int32)
        positions = before + tl.cumsum(is_equal, 0)
        found = tl.minimum(found, tl.min(tl.where((is_equal != 0) & (positions == n), token_ids, 0x7FFFFFFF), 0))
        before += tl.sum(is_equal, 0)
    return found


@triton.jit
def truncate(row, top, MAX_LISTED: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Keeps the most likely entries until their number reaches ``top``, or with ``BY_MASS`` until their sum reaches the
    fraction ``top`` of the total. Returns the changed fields of the row: ``is_listed``, ``count``, ``edge``, ``last``.

    The edge is the largest weight for which the entries with at least this weight reach the limit. The kernel searches
    its bits: each pass over the row reduces the range to a quarter. Once at most MAX_LISTED entries are at or above the
    lower bound, they are written to a list.
    """
    logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last = row
    low, high = 0, ONE + 1
    count_low, count_high = count, 0
    above = tl.zeros((), tl.float64)  # number (with BY_MASS sum) of entries with bits of at least ``high``
    limit = top
    bound0, bound1, bound2 = FIRST_BOUNDS[0], FIRST_BOUNDS[1], FIRST_BOUNDS[2]
    is_first = True
    while high - low > 1:
        if not is_first:
            bound1 = low + (high - low) // 2
            bound0 = low + (bound1 - low) // 2
            bound2 = bound1 + (high - bound1) // 2
        now = (logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last)
        count0, count1, count2, amount0, amount1, amount2 = count_and_sum(now, bound0, bound1, bound2, BY_MASS, BLOCK)
        if BY_MASS and is_first:
            limit = top * amount0
        is_first = False
        if amount2 >= limit:
            low, count_low = bound2, count2
        elif amount1 >= limit:
            low, count_low, high, count_high, above = bound1, count1, bound2, count2, amount2
        elif amount0 >= limit:
            low, count_low, high, count_high, above = bound0, count0, bound1, count1, amount1
        else:
            high, count_high, above = bound0, count0, amount0
        if (not is_listed) & (count_low <= MAX_LISTED):
            now = (logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last)
            count = list_entries(now, low, BLOCK)
            is_listed = True
    if low > 0:
        kept = limit - above
        if BY_MASS:
            kept = tl.ceil(kept / tl.cast(low, tl.float32, bitcast=True).to(tl.float64))
        now = (logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last)
        if low > edge:
            last = 0x7FFFFFFF
        if kept < (count_low - count_high).to(tl.float64):
            last = nth_of_equal(now, low, kept.to(tl.int32), BLOCK)
        edge = low
    return is_listed, count, edge, last


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "uniforms"])
def sample_random(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    listed_weights,
    listed_ids,
    block_sums,
    out,
    vocabulary,
    stride,
    MAX_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Samples a token with temperature, min-p, top-k and top-p. One program per row.

    Args:
        listed_weights, listed_ids: ``[rows, MAX_LISTED]``, memory for ``list_entries``.
        block_sums: ``[rows, BLOCKS]`` float64, memory for the sums of blocks.
    """
    index = tl.program_id(0).to(tl.int64)
    logits += index * stride
    listed_weights += index * MAX_LISTED
    listed_ids += index * MAX_LISTED
    block_sums += index * BLOCKS
    temperature = tl.maximum(tl.load(temperatures + index).to(tl.float32), 1e-5)
    min_p = tl.load(min_ps + index).to(tl.float32)
    lanes = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        lanes = tl.maximum(lanes, tl.load(logits + at, mask=at < vocabulary, other=float("-inf")))
    largest = tl.div_rn(tl.max(lanes, 0), temperature)
    is_listed, count, edge, last = False, vocabulary, 0, -1
    top_k = tl.load(top_ks + index)
    if (top_k > 0) & (top_k < vocabulary):
        row = (logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last)
        is_listed, count, edge, last = truncate(row, top_k, MAX_LISTED, False, BLOCK)
    top_p = tl.load(top_ps + index)
    if top_p < 1:
        row = (logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last)
        is_listed, count, edge, last = truncate(row, top_p, MAX_LISTED, True, BLOCK)

    # Invert the cumulative distribution: find the block by the sums of blocks, then the entry in this block.
    row = (logits, listed_weights, listed_ids, is_listed, count, temperature, largest, min_p, edge, last)
    for start in range(0, count, BLOCK):
        weights, _, _ = load_entries(row, start, BLOCK)
        tl.store(block_sums + start // BLOCK, tl.sum(weights.to(tl.float64), 0))
    tl.debug_barrier()
    blocks = tl.arange(0, BLOCKS)
    sums = tl.load(block_sums + blocks, mask=blocks * BLOCK < count, other=0.0)
    ends = tl.cumsum(sums, 0)
    threshold = tl.load(uniforms + index) * tl.max(ends, 0)
    block = tl.min(tl.where((ends > threshold) & (sums > 0), blocks, BLOCKS), 0)
    block = tl.minimum(block, tl.max(tl.where(sums > 0, blocks, 0), 0))  # if rounding leaves no block
    before = tl.sum(tl.where(blocks == block, ends - sums, 0.0), 0)
    weights, token_ids, _ = load_entries(row, block * BLOCK, BLOCK)
    cumulative = before + tl.cumsum(weights.to(tl.float64), 0)
    found = tl.min(tl.where((cumulative > threshold) & (weights > 0), token_ids, 0x7FFFFFFF), 0)
    found = tl.minimum(found, tl.max(tl.where(weights > 0, token_ids, 0), 0))
    tl.store(out + index, found.to(tl.int64))
