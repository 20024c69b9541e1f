"""Attention over the paged KV cache, for mixed batches of prefill and decode."""

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
"""Number of positions of a split, the smallest part of a sequence that a program may process separately. Bits of
results depend on this number."""
ITEMS = 4
"""Minimum number of work items per program, if sequences are long enough. The times of programs then differ by at most
a quarter."""
WORKSPACE_BYTES = 64 << 20
"""Size of the workspace for partial results in bytes. A sequence is not split if its results do not fit."""
PLAN_BLOCK = 1024
"""Number of sequences that the plan kernel processes at a time."""
REDUCE_PROGRAMS = 4
"""Number of programs of the reduction per multiprocessor."""


@dataclass(frozen=True)
class Variant:
    """Kernel configuration. Only ``tile`` affects the bits of results; it is constant for a GPU and a KV cache."""

    tile: int
    """Number of positions that are processed at a time."""
    rows: int
    """Number of rows of a tile of queries (heads times tokens): a multiple of 64, or the same for all steps, so that
    Hopper uses the same kind of instructions for all tiles."""
    num_warps: int
    num_stages: int
    programs: int
    """Number of programs per multiprocessor."""
    in_memory: bool
    """``IN_MEMORY`` of ``kernels.attention.attention``."""


@dataclass(frozen=True)
class Plan:
    """Work items of a step, for layers of the same shape, and memory for partial results."""

    variant: Variant
    tensor: Tensor
    """Work items, written by ``kernels.attention.plan``."""
    programs: int
    """Total number of programs."""
    group_tile: int
    """Number of heads of a tile of queries."""
    head_tiles: int
    """Number of tiles of the heads of a token."""
    partial: Tensor
    """Accumulators, with one row per split, token and head."""
    partial_sums: Tensor
    """Maximum and sum for each row of ``partial``."""
    first_row: int
    """First row of ``partial`` that belongs to a program; the rows before it belong to split sequences."""


def choose(
    decode: bool,
    item_bytes: int,
    quantization: str,
    group: int,
    dim: int,
    capability: tuple[int, int],
    alibi: bool = False,
) -> Variant:
    """Choose the configuration for a step: the largest tiles that were compiled without spilling registers.

    Decoding reads keys and values for a few rows, and is memory-bound: it uses two programs per multiprocessor, so that
    one reads while the other computes. Prefill shares the keys and values that it reads among as many rows as possible.
    The loop has dependent loads (through the block table), so that 5 stages have two tiles in flight, and 3 stages one.

    Args:
        decode: True if sequences have few queries.
        item_bytes: size of an element of queries.
        group: number of heads per KV head.
        dim: head size, rounded up to a power of two.
        alibi: True with ALiBi.
    """
    # For group sizes that are no power of two, the division takes a few more registers, and so do the slopes of ALiBi.
    odd = bool(group & (group - 1)) or alibi
    if dim > 256:  # the tiles of latent attention, which has accumulators of the same size
        if item_bytes == 4:
            return Variant(16, 16, 4, 1, 1, True)
        if quantization:
            return Variant(16, 16, 8, 2, 1, True) if capability >= (9, 0) else Variant(16, 16, 4, 2, 1, True)
        return Variant(32, 32, 8, 2, 1, True)
    if item_bytes == 4:  # float32 has no matrix instructions, and is used in tests only
        return Variant(32, 64, 8, 1, 1, True)
    if dim > 128:
        return Variant(32, 64, 8, 3, 1, True)
    if capability < (9, 0):
        if odd:
            return Variant(32, 64, 8, 5, 1, True) if quantization else Variant(32, 64, 4, 3, 2, True)
        return Variant(32, 64, 4, 5, 2, True) if quantization else Variant(64, 64, 4, 3, 2, True)
    if capability >= (10, 0):
        if alibi and quantization:
            return Variant(32, 64, 4, 4, 2, True)
        if odd and not quantization:
            return Variant(32, 64, 4, 6, 2, True)
        return Variant(64, 64, 4, 4 if quantization else 6, 2, True)
    if decode:
        stages = 5 if quantization == "int8" else 2 if quantization and odd else 3
        return Variant(64, 64, 4, stages, 2, True)
    return Variant(64, 128, 8, 5, 1, True) if quantization or odd else Variant(64, 128, 8, 3, 1, False)


@cached
def workspace(device: torch.device, size: int) -> Tensor:
    """Return memory for partial results, shared by all layers and steps on a device, at a fixed address."""
    return torch.empty(size // 4, dtype=torch.float32, device=device)


def plan_of(
    metadata: AttentionMetadata,
    variant: Variant,
    heads: int,
    kv_heads: int,
    dim: int,
    options: AttentionOptions,
) -> Plan:
    """Return the plan of a step, which layers of the same shape share.

    Args:
        dim: size of a value vector.
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
    max_positions: int,
    num_stages: int = 6,
    max_warps: int = 8,
) -> None:
    """Write the results of split sequences to ``out``. Does nothing if sequences are too short for splits.

    Args:
        max_positions: largest number of positions of a sequence that the block tables can hold.
    """
    sequences = len(metadata.block_tables)
    if max_positions <= SPLIT:  # no sequence has two splits
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
    """See ``reference.attention``. Runs three kernels: a plan of the work, which layers of the same shape share
    (``metadata.plan``), attention, and the reduction of split sequences.

    Tensors of ``metadata`` may be padded with sequences without queries and of length 0.
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
        options.alibi is not None,
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
        options.alibi,
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
    reduce_splits(out, metadata, plan, heads, spec, options, metadata.block_tables.shape[1] * spec.block_size)
    return out
