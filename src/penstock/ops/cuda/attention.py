"""Attention over the paged KV cache, for any mixture of decoding and prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache as cached

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import KVSpec

from ..batch import AttentionMetadata, AttentionOptions
from .elementwise import power_of_two
from .kernels import attention as kernels
from .kv_cache import LayerCache, block_strides
from .launch import architecture, launch, sm_count

SPLIT = 256
"""Positions of a split: the smallest part of a sequence that a program may walk alone. Bits depend on it."""
ITEMS = 4
"""Work items for each program, at least, where sequences are long enough: programs then end together within a quarter
of their time."""
WORKSPACE_BYTES = 64 << 20
"""Of the partial results of split sequences. Those that do not fit are not split."""
PLAN_BLOCK = 1024
"""Sequences that the plan looks at together."""
REDUCE_PROGRAMS = 4
"""Of the reduction, for each multiprocessor."""


@dataclass(frozen=True)
class Variant:
    """How the work is cut for programs. Only ``tile`` changes bits: of one GPU and cache it is always the same."""

    tile: int
    """Positions that are walked at once."""
    rows: int
    """Of a tile of queries: heads times tokens. A multiple of 64, so that Hopper multiplies all with the same kind of
    instructions."""
    num_warps: int
    num_stages: int
    programs: int
    """For each multiprocessor."""
    in_memory: bool
    """As in the kernel."""


@dataclass(frozen=True)
class Plan:
    """The work items of a step, for the layers of one shape, and memory for partial results."""

    variant: Variant
    tensor: Tensor
    programs: int
    group_tile: int
    """Heads of a tile of queries."""
    head_tiles: int
    """Tiles of a token's heads."""
    partial: Tensor
    """Accumulators, with a row of numbers for each split and head."""
    partial_sums: Tensor
    """Two numbers for each row of ``partial``."""
    first_row: int
    """Row of ``partial`` from which on each program has its own."""


def choose(
    decode: bool, item_bytes: int, quantization: str, group: int, dim: int, capability: tuple[int, int]
) -> Variant:
    """The variant for a step: tiles as large as registers allow without spilling, which the compiler has told.

    Decoding reads keys and values for a few rows, and is bound by memory: two programs on a multiprocessor, so that one
    reads while the other computes. Prefill shares what it reads among as many rows as possible. The loop has loads that
    depend on another one (of the block table), so that two tiles are in flight with 5 stages, and one with 3.

    Args:
        decode: whether sequences have few queries.
        item_bytes: of a number in queries.
        group: heads that share keys and values.
        dim: of a head, as a power of two.
    """
    odd = group & (group - 1)  # rows are then divided by no power of two, which takes a few registers more
    if item_bytes == 4:  # float32 is for checks: it has no matrix instructions
        return Variant(32, 64, 8, 1, 1, True)
    if dim > 128:
        return Variant(32, 64, 8, 3, 1, True)
    if capability < (9, 0):
        if odd:
            return Variant(32, 64, 8, 5, 1, True) if quantization else Variant(32, 64, 4, 3, 2, True)
        return Variant(32, 64, 4, 5, 2, True) if quantization else Variant(64, 64, 4, 3, 2, True)
    if capability >= (10, 0):
        if odd and not quantization:
            return Variant(32, 64, 4, 6, 2, True)
        return Variant(64, 64, 4, 4 if quantization else 6, 2, True)
    if decode:
        stages = 5 if quantization == "int8" else 2 if quantization and odd else 3
        return Variant(64, 64, 4, stages, 2, True)
    return Variant(64, 128, 8, 5, 1, True) if quantization or odd else Variant(64, 128, 8, 3, 1, False)


@cached
def workspace(device: torch.device, size: int) -> Tensor:
    """Memory for partial results, which all layers and steps on a device share; its address never changes."""
    return torch.empty(size // 4, dtype=torch.float32, device=device)


def plan_of(
    metadata: AttentionMetadata,
    variant: Variant,
    heads: int,
    kv_heads: int,
    dim: int,
    options: AttentionOptions,
) -> Plan:
    """The plan of a step: the one that a layer before has made, if it has the same shape.

    Args:
        dim: numbers of a value.
    """
    key = (variant, heads, kv_heads, dim, options.window, options.causal)
    if metadata.plan is None:
        metadata.plan = {}
    found: Plan | None = metadata.plan.get(key)
    if found:
        return found
    sequences, device = metadata.block_tables.shape[0], metadata.block_tables.device
    group = heads // kv_heads
    group_tile = min(group, variant.rows)
    head_tiles = kv_heads * -(-group // group_tile)
    programs = sm_count(device) * variant.programs
    memory, partial_rows = workspace(device, WORKSPACE_BYTES), WORKSPACE_BYTES // 4 // (dim + 2)
    capacity = (partial_rows - programs * variant.rows) // heads
    tensor = torch.empty(4 + 3 * sequences, dtype=torch.int32, device=device)
    sums = memory[partial_rows * dim :]
    plan = Plan(variant, tensor, programs, group_tile, head_tiles, memory, sums, capacity * heads)
    metadata.plan[key] = plan
    launch(
        kernels.plan,
        (1,),
        metadata.query_start_loc,
        metadata.seq_lens,
        plan.tensor,
        sequences,
        capacity,
        programs * ITEMS,
        HEAD_TILES=head_tiles,
        TOKENS=variant.rows // group_tile,
        WINDOW=options.window,
        SPLIT=SPLIT,
        CAUSAL=options.causal,
        BLOCK=PLAN_BLOCK,
    )
    return plan


def reduce_splits(
    out: Tensor,
    metadata: AttentionMetadata,
    plan: Plan,
    heads: int,
    spec: KVSpec,
    options: AttentionOptions,
    num_stages: int = 6,
    max_warps: int = 8,
) -> None:
    """Reduce the sequences that were split, if the block tables have room for any, to ``out``."""
    sequences, table_width = metadata.block_tables.shape
    if table_width * spec.block_size <= SPLIT:  # no sequence has two splits
        return
    dim, rows = spec.latent or spec.head_dim, power_of_two(plan.group_tile)
    padded = max(power_of_two(dim), 16)
    launch(
        kernels.reduce,
        (min(len(out) * plan.head_tiles, sm_count(out.device) * REDUCE_PROGRAMS),),
        out,
        metadata.query_start_loc,
        metadata.seq_lens,
        plan.tensor,
        plan.partial,
        plan.partial_sums,
        options.sinks,
        sequences,
        out.stride(0),
        KV_HEADS=spec.kv_heads,
        GROUP=heads // spec.kv_heads,
        GROUP_TILE=plan.group_tile,
        HEAD_DIM=dim,
        WINDOW=options.window,
        CAUSAL=options.causal,
        CHUNKED=options.chunked,
        SPLIT=SPLIT,
        ROWS=plan.variant.rows,
        HEADS=rows,
        DIM=padded,
        STAGES=num_stages,
        num_warps=min(max(rows * padded // 512, 1), max_warps),
    )


def attention(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: AttentionOptions, out: Tensor | None = None
) -> Tensor:
    """As ``reference.attention``, in three kernels: a plan of the work, which layers of one shape share
    (``metadata.plan``), attention, and the reduction of sequences that were split.

    Tensors of ``metadata`` may have room for more sequences than there are: those have no queries and length 0.
    """
    spec = cache.spec
    tokens, heads, dim = q.shape
    assert q.stride()[1:] == (dim, 1) and metadata.block_tables.stride(1) == 1
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device) if out is None else out
    sequences = len(metadata.block_tables)
    if not sequences:
        return out
    group, padded = heads // spec.kv_heads, max(power_of_two(dim), 16)
    variant = choose(
        tokens * min(group, 64) <= sequences * 64,
        q.itemsize,
        spec.quantization,
        group,
        padded,
        architecture(q.device).capability,
    )
    plan = plan_of(metadata, variant, heads, spec.kv_heads, dim, options)
    softcap = options.softcap
    launch(
        kernels.attention,
        (plan.programs,),
        q,
        out,
        cache.values,
        cache.scales,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        plan.tensor,
        plan.partial,
        plan.partial_sums,
        options.sinks,
        sequences,
        plan.first_row,
        options.scale / softcap if softcap else options.scale * math.log2(math.e),
        q.stride(0),
        out.stride(0),
        metadata.block_tables.stride(0),
        *block_strides(cache),
        KV_HEADS=spec.kv_heads,
        GROUP=group,
        GROUP_TILE=plan.group_tile,
        HEAD_DIM=dim,
        PAGE=spec.block_size,
        WINDOW=options.window,
        CAUSAL=options.causal,
        CHUNKED=options.chunked,
        QUANTIZED=bool(spec.quantization),
        SPLIT=SPLIT,
        TILE=variant.tile,
        ROWS=variant.rows,
        DIM=padded,
        IN_MEMORY=variant.in_memory,
        CAP=softcap * math.log2(math.e),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
    reduce_splits(out, metadata, plan, heads, spec, options)
    return out
