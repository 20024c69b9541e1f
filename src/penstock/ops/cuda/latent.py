"""Multi-head latent attention (MLA), dense and sparse: products with a separate matrix per head, and the latent KV
cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import AttentionMetadata, AttentionOptions
from .attention import SPLIT, Variant, plan_of, reduce_splits, workspace
from .elementwise import power_of_two
from .kernels import latent as kernels
from .kernels import sparse as sparse_kernels
from .kv_cache import LayerCache, block_strides
from .launch import launch

ROWS, COLUMNS = 64, 64
"""Tile of a product: tokens and outputs. It does not depend on the number of tokens, so that all batches use the same
instructions."""
HEADS = 16
"""Number of heads for which a program rotates the queries."""
SCORE_TILE, SCORE_POSITIONS = 64, 512
"""Number of positions that a program scores at a time, and in total."""
SCORE_BYTES = 256 << 20
"""Maximum size of the scores of a group of queries in bytes, unless those of one query are larger."""
SELECT_BLOCK = 2048
"""Number of scores that the selection of a query's keys reads at a time."""


@dataclass(frozen=True)
class HeadMatrices:
    """A separate matrix per head."""

    weight: Tensor
    """``[heads, out, in]``, contiguous."""


def pack_by_head(weight: Tensor) -> HeadMatrices:
    """See ``reference.pack_by_head``."""
    return HeadMatrices(weight.contiguous())


def linear_by_head(x: Tensor, matrices: HeadMatrices, out: Tensor | None = None) -> Tensor:
    """See ``reference.linear_by_head``."""
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
    index_keys: Tensor | None = None,
) -> None:
    """See ``reference.latent_rope_and_store``. Tokens with negative slots are padding."""
    spec, (tokens, heads, rope_dim) = cache.spec, q.shape
    assert q.stride(2) == k.stride(1) == latent.stride(1) == out.stride(2) == 1
    assert index_keys is None or (index_keys.stride(1) == 1 and not spec.quantization)
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
        index_keys,
        0 if index_keys is None else index_keys.stride(0),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        latent.stride(0),
        out.stride(0),
        out.stride(1),
        *block_strides(cache),
        HEADS=heads,
        LATENT=latent.shape[1],
        INDEX=spec.index_dim,
        HALF=rope_dim // 2,
        INTERLEAVED=interleaved,
        PAGE=spec.block_size,
        QUANTIZATION=spec.quantization,
        ROWS=min(HEADS, power_of_two(heads)),
        DIM=power_of_two(latent.shape[1]),
        HALF_BLOCK=power_of_two(rope_dim // 2),
        INDEX_BLOCK=power_of_two(max(spec.index_dim, 1)),
        num_warps=4,
    )


def latent_attention(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, scale: float, latent: int, selected: bool = False
) -> Tensor:
    """See ``reference.latent_attention``."""
    assert latent == cache.spec.latent
    return attend_latent(q, cache, metadata, scale, selected)


def attend_latent(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    scale: float,
    selected: bool = False,
    parts: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run the three kernels of ``attention.attention`` over a latent cache.

    Args:
        q, metadata, scale, selected: arguments of ``reference.latent_attention``.
        parts: number of vectors of a slot, which the slots of a selection are multiplied by (see
            ``reference.select_entries``).
        sinks: ``AttentionOptions.sinks``.
    """
    spec, (tokens, heads, dim) = cache.spec, q.shape
    latent = spec.latent
    assert q.is_contiguous() and metadata.block_tables.stride(1) == 1
    out = torch.empty((tokens, heads, latent), dtype=q.dtype, device=q.device)
    sequences = len(metadata.block_tables)
    if not sequences:
        return out
    # All steps use the same variant, with as many rows and positions as possible without spilling registers.
    if q.itemsize == 4:
        variant = Variant(16, 16, 4, 1, 1, True)
    else:
        variant = Variant(16, 16, 8, 2, 1, True) if spec.quantization else Variant(32, 32, 8, 2, 1, True)
    options = AttentionOptions(scale, sinks=sinks)
    plan = plan_of(metadata, variant, heads, 1, latent, options)
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
        plan.partial,
        plan.partial_sums,
        sinks,
        sequences,
        plan.first_row,
        scale * math.log2(math.e),
        metadata.block_tables.stride(0),
        *block_strides(cache),
        HEADS=heads,
        HEAD_TILE=plan.group_tile,
        LATENT=latent,
        ROPE=dim - latent,
        ROW=spec.head_dim,
        PAGE=spec.block_size,
        SELECTED=selected,
        PARTS=parts,
        QUANTIZED=bool(spec.quantization),
        SPLIT=SPLIT,
        TILE=variant.tile,
        ROWS=variant.rows,
        DIM=max(power_of_two(latent), 16),
        ROPE_DIM=max(power_of_two(dim - latent), 16),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )
    table_positions = metadata.block_tables.shape[1] * (1 if selected else spec.block_size)
    reduce_splits(out, metadata, plan, heads, spec, options, table_positions, num_stages=1, max_warps=16)
    return out


def select_keys(
    q: Tensor, weights: Tensor, cache: LayerCache, metadata: AttentionMetadata, top_k: int, scale: float
) -> AttentionMetadata:
    """See ``reference.select_keys``."""
    return select(cache, metadata, q.shape[0], top_k, q, weights, scale)


def select(
    cache: LayerCache,
    metadata: AttentionMetadata,
    tokens: int,
    top_k: int,
    q: Tensor | None,
    weights: Tensor | None,
    scale: float,
    window: int = 0,
    rate: int = 1,
    parts: int = 1,
) -> AttentionMetadata:
    """Select the last ``window`` positions, and ``top_k`` of the other candidates: all positions, or the last positions
    of entries of ``rate`` tokens (0: no candidates). Queries are processed in groups, whose scores use limited memory.

    Args:
        q, weights: None if there are at most ``top_k`` candidates.
        parts: argument of ``attend_latent``.
    """
    spec, device = cache.spec, metadata.seq_lens.device
    assert metadata.block_tables.stride(1) == 1
    sequences, width = metadata.block_tables.shape
    candidates = width * spec.block_size // rate if rate else 0
    starts, counts, plan = _shared(metadata, tokens, (window, rate, top_k))
    slots = torch.empty((tokens, window + top_k), dtype=torch.int32, device=device)
    row = candidates if q is not None and candidates > top_k else 0
    group = min(max(SCORE_BYTES // 4 // row, 1), tokens) if row else tokens
    # allocated once, since the forward pass that measures the memory of activations has short sequences
    scores = workspace(device, max(SCORE_BYTES, 4 * row) if row else 0)[: group * row].view(group, row)
    place = metadata.block_tables, metadata.query_start_loc, metadata.seq_lens
    for first in range(0, tokens if sequences else 0, max(group, 1)):
        queries = min(group, tokens - first)
        if row:
            assert q is not None and weights is not None and q.is_contiguous() and weights.is_contiguous()
            heads, dim = q.shape[1:]
            launch(
                sparse_kernels.index_scores,
                (queries, -(-candidates // SCORE_POSITIONS)),
                q,
                weights,
                cache.values,
                *place,
                scores,
                first,
                sequences,
                scale,
                scores.stride(0),
                metadata.block_tables.stride(0),
                cache.values.stride(0),
                HEADS=heads,
                INDEX=dim,
                ROW=spec.head_dim,
                PAGE=spec.block_size,
                TOP_K=top_k,
                RATE=rate,
                POSITIONS=SCORE_POSITIONS,
                TILE=SCORE_TILE,
                ROWS=max(power_of_two(heads), 16),
                DIM=max(power_of_two(dim), 16),
                num_warps=8 if heads > 32 else 4,
                num_stages=2,
            )
        launch(
            sparse_kernels.select_keys,
            (queries,),
            scores,
            *place,
            slots,
            counts,
            first,
            sequences,
            scores.stride(0),
            metadata.block_tables.stride(0),
            PAGE=spec.block_size,
            TOP_K=top_k,
            WINDOW=window,
            RATE=rate,
            PARTS=parts,
            BLOCK=SELECT_BLOCK,
            num_warps=8,
        )
    return AttentionMetadata(starts, counts, slots, plan=plan)


def _shared(
    metadata: AttentionMetadata, tokens: int, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, dict[Any, Any]]:
    """``query_start_loc``, ``seq_lens`` and plan of the selections of a step, which all layers with the same ``sizes``
    (window, rate and ``top_k``) share. Padding tokens are no queries."""
    metadata.plan = {} if metadata.plan is None else metadata.plan
    key = "selected keys", sizes
    if key not in metadata.plan:
        numbers = torch.arange(tokens + 1, dtype=torch.int32, device=metadata.seq_lens.device)
        starts = torch.minimum(numbers, metadata.query_start_loc[-1:])
        metadata.plan[key] = starts, torch.empty_like(starts[1:]), dict[Any, Any]()
    shared: tuple[Tensor, Tensor, dict[Any, Any]] = metadata.plan[key]
    return shared
