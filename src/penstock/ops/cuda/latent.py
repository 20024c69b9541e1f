"""Latent attention: heads by matrices of their own, and the latent KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import AttentionMetadata
from .attention import REDUCE_PROGRAMS, SPLIT, WORKSPACE_BYTES, Variant, plan_of, workspace
from .elementwise import power_of_two
from .kernels import attention as attention_kernels
from .kernels import latent as kernels
from .kv_cache import LayerCache, block_strides
from .launch import launch, sm_count

ROWS, COLUMNS = 64, 64
"""Of a product's tile: the same for few tokens as for many, so that all are multiplied with the same instructions."""
HEADS = 16
"""Heads whose queries a program turns."""


@dataclass(frozen=True)
class HeadMatrices:
    """A matrix of each head."""

    weight: Tensor
    """``[heads, out, in]``, contiguous."""


def pack_by_head(weight: Tensor) -> HeadMatrices:
    """As ``reference.pack_by_head``."""
    return HeadMatrices(weight.contiguous())


def linear_by_head(x: Tensor, matrices: HeadMatrices, out: Tensor | None = None) -> Tensor:
    """As ``reference.linear_by_head``."""
    heads, outputs, inputs = matrices.weight.shape
    tokens = x.shape[0]
    out = torch.empty((tokens, heads, outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert x.shape[1:] == (heads, inputs) and x.stride(2) == out.stride(2) == 1
    launch(
        kernels.linear_by_head,
        (-(-tokens // ROWS), -(-outputs // COLUMNS), heads),
        x,
        matrices.weight,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        BLOCK=32 if x.itemsize == 4 else 64,
        num_warps=4,
        num_stages=3,
    )
    return out


def latent_rope_and_store(
    q: Tensor,
    k: Tensor,
    latent: Tensor,
    positions: Tensor,
    table: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    interleaved: bool,
    out: Tensor,
) -> None:
    """As ``reference.latent_rope_and_store``; tokens with negative slots are padding."""
    spec, (tokens, heads, rope_dim) = cache.spec, q.shape
    assert q.stride(2) == k.stride(1) == latent.stride(1) == out.stride(2) == 1
    launch(
        kernels.latent_rope_and_store,
        (tokens, 1 + -(-heads // HEADS)),
        q,
        k,
        latent,
        positions,
        table,
        cache.values,
        cache.scales,
        slot_mapping,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        latent.stride(0),
        out.stride(0),
        out.stride(1),
        *block_strides(cache),
        HEADS=heads,
        LATENT=spec.latent,
        HALF=rope_dim // 2,
        PAIRS=interleaved,
        PAGE=spec.block_size,
        QUANTIZATION=spec.quantization,
        ROWS=min(HEADS, power_of_two(heads)),
        DIM=power_of_two(spec.latent),
        HALF_BLOCK=power_of_two(rope_dim // 2),
        num_warps=4,
    )


def latent_attention(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, scale: float, latent: int) -> Tensor:
    """As ``reference.latent_attention``, in the three kernels of ``attention.attention``."""
    spec, (tokens, heads, dim) = cache.spec, q.shape
    assert q.is_contiguous() and latent == spec.latent and metadata.block_tables.stride(1) == 1
    out = torch.empty((tokens, heads, latent), dtype=q.dtype, device=q.device)
    sequences, table_width = metadata.block_tables.shape
    if not sequences:
        return out
    # One for all steps: as many rows and positions as registers have room for without spilling.
    if q.itemsize == 4:
        variant = Variant(16, 16, 4, 1, 1, True)
    else:
        variant = Variant(16, 16, 8, 2, 1, True) if spec.quantization else Variant(32, 32, 8, 2, 1, True)
    head_tile, padded = min(heads, variant.rows), max(power_of_two(latent), 16)
    head_tiles = -(-heads // head_tile)
    programs = sm_count(q.device) * variant.programs
    memory, partial_rows = workspace(q.device, WORKSPACE_BYTES), WORKSPACE_BYTES // 4 // (latent + 2)
    capacity = (partial_rows - programs * variant.rows) // heads
    plan = plan_of(metadata, variant, head_tile, head_tiles, 0, capacity, programs)
    partial, partial_sums = memory, memory[partial_rows * latent :]
    launch(
        kernels.latent_attention,
        (plan.programs,),
        q,
        out,
        cache.values,
        cache.scales,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        plan.tensor,
        partial,
        partial_sums,
        sequences,
        capacity * heads,
        scale * math.log2(math.e),
        metadata.block_tables.stride(0),
        *block_strides(cache),
        HEADS=heads,
        HEAD_TILE=head_tile,
        LATENT=latent,
        ROPE=dim - latent,
        PAGE=spec.block_size,
        QUANTIZED=bool(spec.quantization),
        SPLIT=SPLIT,
        TILE=variant.tile,
        ROWS=variant.rows,
        DIM=padded,
        ROPE_DIM=max(power_of_two(dim - latent), 16),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
    if table_width * spec.block_size > SPLIT:
        rows = power_of_two(head_tile)
        launch(
            attention_kernels.reduce,
            (min(tokens * head_tiles, sm_count(q.device) * REDUCE_PROGRAMS),),
            out,
            metadata.query_start_loc,
            metadata.seq_lens,
            plan.tensor,
            partial,
            partial_sums,
            None,
            sequences,
            heads * latent,
            KV_HEADS=1,
            GROUP=heads,
            GROUP_TILE=head_tile,
            HEAD_DIM=latent,
            WINDOW=0,
            CAUSAL=True,
            CHUNKED=False,
            SPLIT=SPLIT,
            ROWS=variant.rows,
            HEADS=rows,
            DIM=padded,
            STAGES=1,
            num_warps=min(max(rows * padded // 512, 1), 16),
        )
    return out
