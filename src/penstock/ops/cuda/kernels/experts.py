"""Kernels of mixtures of experts: the router, the choices of each expert, and the sum of a token's experts."""

import triton
import triton.language as tl


@triton.jit
def _best(values, index):
    """The lowest index of the largest value. What is no number is never above another."""
    known = tl.where(values == values, values, float("-inf"))
    return tl.min(tl.where(known == tl.max(known, 0), index, 1 << 30), 0)


@triton.jit
def route(
    logits,
    bias,
    ids,
    weights,
    experts,
    scale,
    min_sum,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    TWO_BEST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Experts and weights of a token. SIZE and CHOICES are powers of two that are not below the experts and TOP_K."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    there = index < experts
    x = tl.load(logits + token * experts + index, mask=there, other=float("-inf"))
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    else:
        known = tl.where(x == x, x, float("-inf"))
        e = tl.where(there, tl.exp(x - tl.max(known, 0)), 0.0)
        scores = e / tl.sum(e, 0)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + index, mask=there, other=0.0)
    choice = tl.where(there & (choice == choice), choice, float("-inf"))
    taken = there == 0
    if TOP_GROUPS < GROUPS:
        group = index // (experts // GROUPS)
        best_of = tl.zeros((SIZE,), tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where(group == g, choice, float("-inf"))
            best = tl.max(own, 0)
            if TWO_BEST:
                best += tl.max(tl.where(index == _best(own, index), float("-inf"), own), 0)
            best_of = tl.where(index == g, best, best_of)
        best_of = tl.where(index < GROUPS, best_of, float("-inf"))
        excluded = index < GROUPS
        kept = tl.zeros((SIZE,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            g = tl.min(
                tl.where(excluded & (best_of == tl.max(tl.where(excluded, best_of, float("-inf")), 0)), index, SIZE), 0
            )
            excluded = excluded & (index != g)
            kept = tl.where(group == g, 1, kept)
        choice = tl.where(kept != 0, choice, float("-inf"))
    slot = tl.arange(0, CHOICES)
    chosen = tl.zeros((CHOICES,), tl.int32)
    values = tl.zeros((CHOICES,), tl.float32)
    total = 0.0
    for j in tl.static_range(TOP_K):
        left = tl.where(taken, float("-inf"), choice)
        expert = tl.min(tl.where((taken == 0) & (left == tl.max(left, 0)), index, SIZE), 0)
        value = tl.sum(tl.where(index == expert, scores, 0.0), 0)
        taken = taken | (index == expert)
        chosen = tl.where(slot == j, expert, chosen)
        values = tl.where(slot == j, value, values)
        total += value
    if RENORMALIZE:
        values = values / tl.maximum(total, min_sum)
    at = token * TOP_K + slot
    tl.store(ids + at, chosen.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights + at, values * scale, mask=slot < TOP_K)


@triton.jit(do_not_specialize=["count"])
def group_choices(
    ids, choices, owners, first, experts, count, BT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """The choices of an expert in ascending order, in tiles of BT places of their own (``choices``), and the expert of
    each tile (``owners``): both are -1 where nothing is written. SIZE is a power of two, and not below ``experts``."""
    expert = tl.program_id(0)
    index = tl.arange(0, SIZE)
    counts = tl.zeros((SIZE,), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + at, mask=at < count, other=-1) - first
        counts += tl.sum((chosen[None, :] == index[:, None]).to(tl.int32), 1)
    counts = tl.where(index < experts, counts, 0)
    tiles = (counts + (BT - 1)) // BT
    first_tile = tl.sum(tl.where(index < expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(index == expert, tiles, 0), 0)
    for tile in range(own_tiles):
        tl.store(owners + first_tile + tile, expert)
    place = first_tile * BT
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = (tl.load(ids + at, mask=at < count, other=-1) - first == expert) & (at < count)
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(choices + place + rank - 1, at, mask=own)
        place += tl.sum(own.to(tl.int32), 0)


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
    """Program (token, block of columns)."""
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
