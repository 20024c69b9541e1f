"""Kernels of mixtures of experts: router, grouping of assignments by expert, and weighted sum of experts' outputs."""

import triton
import triton.language as tl

from .states import softplus


@triton.jit
def _argmax(values, index):
    """Lowest index of the largest value, ignoring NaN."""
    clean = tl.where(values == values, values, float("-inf"))
    return tl.min(tl.where(clean == tl.max(clean, 0), index, 1 << 30), 0)


@triton.jit
def route(
    logits,
    bias,
    factors,
    token_ids,
    table,
    ids,
    weights,
    experts,
    scale,
    min_sum,
    added_sum,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORES: tl.constexpr,
    SUM_TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K_SIZE: tl.constexpr,
):
    """Selects the experts of a token, and computes their weights. SIZE and TOP_K_SIZE are the number of experts and
    TOP_K, rounded up to powers of two. With ``table``, the experts are those of the token id."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    valid = index < experts
    x = tl.load(logits + token * experts + index, mask=valid, other=float("-inf"))
    if SCORES == "sigmoid":
        scores = 1 / (1 + tl.exp(-x))
    elif SCORES == "sqrtsoftplus":
        scores = tl.sqrt(softplus(x))
    else:
        clean = tl.where(x == x, x, float("-inf"))
        e = tl.where(valid, tl.exp(x - tl.max(clean, 0)), 0.0)
        scores = e / tl.sum(e, 0)
    biased = scores
    if bias is not None:
        biased += tl.load(bias + index, mask=valid, other=0.0)
    biased = tl.where(valid & (biased == biased), biased, float("-inf"))
    used = valid == 0
    if TOP_GROUPS < GROUPS:
        group = index // (experts // GROUPS)
        group_scores = tl.zeros((SIZE,), tl.float32)
        for g in tl.static_range(GROUPS):
            group_values = tl.where(group == g, biased, float("-inf"))
            best = tl.max(group_values, 0)
            if SUM_TOP2:
                best += tl.max(tl.where(index == _argmax(group_values, index), float("-inf"), group_values), 0)
            group_scores = tl.where(index == g, best, group_scores)
        group_scores = tl.where(index < GROUPS, group_scores, float("-inf"))
        remaining = index < GROUPS
        kept = tl.zeros((SIZE,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(tl.where(remaining, group_scores, float("-inf")), 0)
            g = tl.min(tl.where(remaining & (group_scores == best), index, SIZE), 0)
            remaining = remaining & (index != g)
            kept = tl.where(group == g, 1, kept)
        biased = tl.where(kept != 0, biased, float("-inf"))
    slot = tl.arange(0, TOP_K_SIZE)
    expert_ids = tl.zeros((TOP_K_SIZE,), tl.int32)
    values = tl.zeros((TOP_K_SIZE,), tl.float32)
    total = 0.0
    for j in tl.static_range(TOP_K):
        if table is not None:
            expert = tl.load(table + tl.load(token_ids + token) * TOP_K + j).to(tl.int32)
        else:
            candidates = tl.where(used, float("-inf"), biased)
            expert = tl.min(tl.where((used == 0) & (candidates == tl.max(candidates, 0)), index, SIZE), 0)
        value = tl.sum(tl.where(index == expert, scores, 0.0), 0)
        used = used | (index == expert)
        expert_ids = tl.where(slot == j, expert, expert_ids)
        values = tl.where(slot == j, value, values)
        total += value
    if RENORMALIZE:
        values = values / (tl.maximum(total, min_sum) + added_sum)
    values *= scale
    if factors is not None:
        values *= tl.load(factors + expert_ids)
    at = token * TOP_K + slot
    tl.store(ids + at, expert_ids.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights + at, values, mask=slot < TOP_K)


@triton.jit(do_not_specialize=["count"])
def group_assignments(
    ids, assignments, tile_experts, first, experts, count, BT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the assignments of an expert in ascending order to ``assignments``, in separate tiles of BT entries, and
    the expert of each tile to ``tile_experts``. All other entries keep the value -1. SIZE is ``experts``, rounded up
    to a power of two."""
    expert = tl.program_id(0)
    index = tl.arange(0, SIZE)
    counts = tl.zeros((SIZE,), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        expert_ids = tl.load(ids + at, mask=at < count, other=-1) - first
        counts += tl.sum((expert_ids[None, :] == index[:, None]).to(tl.int32), 1)
    counts = tl.where(index < experts, counts, 0)
    tiles = (counts + (BT - 1)) // BT
    first_tile = tl.sum(tl.where(index < expert, tiles, 0), 0)
    num_tiles = tl.sum(tl.where(index == expert, tiles, 0), 0)
    for tile in range(num_tiles):
        tl.store(tile_experts + first_tile + tile, expert)
    position = first_tile * BT
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        selected = (tl.load(ids + at, mask=at < count, other=-1) - first == expert) & (at < count)
        rank = tl.cumsum(selected.to(tl.int32), 0)
        tl.store(assignments + position + rank - 1, at, mask=selected)
        position += tl.sum(selected.to(tl.int32), 0)


@triton.jit
def combine(
    x,
    weights,
    shared,
    gate,
    out,
    size,
    shared_stride,
    out_stride,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted sum of the experts' outputs. Grid: token, block of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        at = token * TOP_K + j
        value = tl.load(x + at * size + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(value, tl.load(weights + at) + tl.zeros((BLOCK,), tl.float32), total)
    if shared is not None:
        value = tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            value = value / (1 + tl.exp(-tl.load(gate + token)))
        total += value
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=inside)
