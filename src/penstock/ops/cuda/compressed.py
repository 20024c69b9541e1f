"""Compressed attention and hyper-connections (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import AttentionMetadata, Batch
from ..compressed import Compression
from .elementwise import COLUMNS, HEADS, power_of_two
from .kernels import compressed as kernels
from .kv_cache import LayerCache, block_strides
from .latent import attend_latent, select
from .launch import launch
from .states import SEQUENCES, keep_inputs, num_sequences, state_numbers

STREAM_COLUMNS = 512
"""Number of columns of all residual streams that a program mixes."""


def compress(
    x: Tensor,
    sizes: Compression,
    bias: Tensor,
    norm: Tensor,
    table: Tensor,
    cache: LayerCache,
    states: Mapping[str, Tensor],
    batch: Batch,
) -> None:
    """See ``reference.compress``. Tokens with negative slots are padding."""
    state, kept, spec, width = states[sizes.state], states[sizes.inputs], cache.spec, 2 * sizes.channels
    starts, slots, accepted, *_ = numbers = state_numbers(batch)
    assert x.stride(1) == 1 and bias.is_contiguous() and not spec.quantization and x.shape[1] == width
    launch(
        kernels.compress,
        (x.shape[0],),
        starts,
        slots,
        accepted,
        batch.positions,
        batch.slot_mapping,
        x,
        kept,
        state,
        bias,
        norm,
        table,
        cache.values,
        num_sequences(batch),
        x.stride(0),
        kept.shape[1],
        block_strides(cache)[0],
        sizes.eps,
        DIM=sizes.dim,
        RATE=sizes.rate,
        OVERLAP=sizes.overlap,
        ROPE=table.shape[1],
        OFFSET=sizes.offset,
        PAGE=spec.block_size,
        ROW=spec.head_dim,
        SEQUENCES=SEQUENCES,
        BLOCK=power_of_two(sizes.dim),
    )
    launch(
        kernels.compress_state,
        (-(-width // COLUMNS), sizes.span, num_sequences(batch)),
        *numbers,
        batch.positions,
        x,
        kept,
        state,
        x.stride(0),
        kept.shape[1],
        SPAN=sizes.span,
        WIDTH=width,
        BLOCK=COLUMNS,
    )
    keep_inputs(batch, x, kept)


def select_entries(
    cache: LayerCache,
    metadata: AttentionMetadata,
    tokens: int,
    window: int,
    rate: int,
    top_k: int,
    q: Tensor | None = None,
    weights: Tensor | None = None,
    scale: float = 1.0,
) -> AttentionMetadata:
    """See ``reference.select_entries``."""
    return select(cache, metadata, tokens, top_k, q, weights, scale, window=window, rate=rate, parts=2 if rate else 1)


def compressed_attention(
    q: Tensor, cache: LayerCache, selection: AttentionMetadata, scale: float, sinks: Tensor
) -> Tensor:
    """See ``reference.compressed_attention``."""
    parts = 2 if cache.spec.index_dim else 1
    return attend_latent(q, cache, selection, scale, selected=True, parts=parts, sinks=sinks)


def rotate_tail(x: Tensor, positions: Tensor, table: Tensor, inverse: bool = False) -> None:
    """See ``reference.rotate_tail``."""
    tokens, heads, dim = x.shape
    half = table.shape[1] // 2
    assert x.is_contiguous()
    rows = min(HEADS, power_of_two(heads))
    launch(
        kernels.rotate_tail,
        (tokens, -(-heads // rows)),
        x,
        positions,
        table,
        HEADS=heads,
        DIM=dim,
        HALF=half,
        INVERSE=inverse,
        ROWS=rows,
        BLOCK=power_of_two(half),
    )


def hyper_weights(logits: Tensor, base: Tensor, scale: Tensor, streams: int, iterations: int, eps: float) -> Tensor:
    """See ``reference.hyper_weights``."""
    assert logits.is_contiguous() and logits.dtype is base.dtype is scale.dtype is torch.float32
    out = torch.empty_like(logits)
    launch(
        kernels.hyper_weights,
        (logits.shape[0],),
        logits,
        base,
        scale,
        out,
        iterations,
        eps,
        STREAMS=streams,
        COLLAPSE_ONLY=logits.shape[1] == streams,
        SIZE=power_of_two(streams),
        num_warps=1,
    )
    return out


def collapse_streams(x: Tensor, weights: Tensor, streams: int) -> Tensor:
    """See ``reference.collapse_streams``."""
    tokens, size = x.shape[0], x.shape[1] // streams
    assert x.is_contiguous() and weights.stride(1) == 1
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    grid, stride = (tokens, -(-size // COLUMNS)), _row_stride(weights)
    launch(kernels.collapse_streams, grid, x, weights, out, stride, size, STREAMS=streams, BLOCK=COLUMNS)
    return out


def mix_streams(x: Tensor, residual: Tensor, weights: Tensor, streams: int) -> Tensor:
    """See ``reference.mix_streams``. ``residual`` is changed in place."""
    tokens, size = x.shape
    assert x.is_contiguous() and residual.is_contiguous() and weights.stride(1) == 1
    launch(
        kernels.mix_streams,
        (tokens, -(-size // STREAM_COLUMNS)),
        x,
        residual,
        weights,
        _row_stride(weights),
        size,
        STREAMS=streams,
        SIZE=power_of_two(streams),
        BLOCK=STREAM_COLUMNS,
    )
    return residual


def _row_stride(weights: Tensor) -> int:
    """Elements between the weights of two tokens; 0 if all tokens have the same."""
    return weights.stride(0) if weights.shape[0] > 1 else 0
