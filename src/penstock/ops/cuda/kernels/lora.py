"""Kernels of LoRA. Weights are the rows of the matrix instruction, and tokens its columns (see ``matrix.py``). Tokens
with other adapters are replaced by zeros."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def shrink(
    x,
    row_slots,
    a,
    ranks,
    partial,
    tokens,
    inputs,
    max_rank,
    x_stride,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Writes the products of a block of tokens and ROWS rows of an adapter's ``a`` (``[slots, max_rank, inputs]``),
    over SPLIT inputs, to ``partial``, ``[splits, tokens, max_rank]`` float32. Only ranks of the adapter are written."""
    split, rank_tiles = tl.program_id(1), max_rank // ROWS
    slot = tl.program_id(2) // rank_tiles
    first_rank = tl.program_id(2) % rank_tiles * ROWS
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    token_mask = tl.load(row_slots + token, mask=token < tokens, other=-1) == slot
    if (tl.max(token_mask.to(tl.int32), 0) > 0) & (first_rank < tl.load(ranks + slot)):
        row = tl.arange(0, BN)
        first = split * SPLIT
        k = first + tl.arange(0, BK)
        a_at = a + (slot.to(tl.int64) * max_rank + first_rank + row)[:, None] * inputs + k[None, :]
        x_at = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
        acc = tl.zeros((BN, BT), tl.float32)
        for start in range(first, tl.minimum(first + SPLIT, inputs), BK):
            inside = (tl.arange(0, BK) < inputs - start)[None, :]
            weights = tl.load(a_at, mask=(row < ROWS)[:, None] & inside, other=0.0)
            values = tl.load(x_at, mask=token_mask[:, None] & inside, other=0.0)
            acc = tl.dot(weights, tl.trans(values), acc, input_precision="ieee")
            a_at += BK
            x_at += BK
        at = partial + (split.to(tl.int64) * tokens + token)[:, None] * max_rank + (first_rank + row)[None, :]
        tl.store(at, tl.trans(acc), mask=token_mask[:, None] & (row < ROWS)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def expand(
    partial,
    row_slots,
    b,
    scalings,
    spans,
    out,
    tokens,
    outputs,
    max_rank,
    splits,
    out_stride,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
):
    """Adds the products with BN rows of an adapter's ``b`` (``[slots, outputs, max_rank]``) to the outputs of its
    tokens. ``spans`` (``[slots, tiles, 2]``) is the range of ranks that are nonzero in these rows."""
    slot, tile = tl.program_id(2), tl.program_id(0)
    token = tl.program_id(1) * BT + tl.arange(0, BT)
    token_mask = tl.load(row_slots + token, mask=token < tokens, other=-1) == slot
    span = spans + (slot * tl.num_programs(0) + tile) * 2
    first, last = tl.load(span), tl.load(span + 1)
    if (tl.max(token_mask.to(tl.int32), 0) > 0) & (first < last):
        output = tile * BN + tl.arange(0, BN)
        rank = tl.arange(0, BR)
        acc = tl.zeros((BN, BT), tl.float32)
        for start in range(first // BR * BR, last, BR):
            rank_mask = (start + rank < last)[None, :]
            values = tl.zeros((BT, BR), tl.float32)
            at = partial + token.to(tl.int64)[:, None] * max_rank + (start + rank)[None, :]
            for _ in range(splits):
                values += tl.load(at, mask=token_mask[:, None] & rank_mask, other=0.0)
                at += tokens * max_rank
            row = slot.to(tl.int64) * outputs + output
            weights_at = b + row[:, None] * max_rank + (start + rank)[None, :]
            weights = tl.load(weights_at, mask=(output < outputs)[:, None] & rank_mask, other=0.0)
            acc = tl.dot(weights, tl.trans(values.to(DTYPE)), acc, input_precision="ieee")
        acc *= tl.load(scalings + slot * outputs + output, mask=output < outputs, other=0.0)[:, None]
        at = out + token.to(tl.int64)[:, None] * out_stride + output[None, :]
        inside = token_mask[:, None] & (output < outputs)[None, :]
        old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (old + tl.trans(acc)).to(out.dtype.element_ty), mask=inside)
