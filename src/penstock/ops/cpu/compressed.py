"""Compressed attention (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _kernels
from ..batch import AttentionMetadata, AttentionOptions, Batch
from ..compressed import Compression
from .dtypes import DTYPE_CODES
from .graph import empty
from .kv_cache import LayerCache, attention
from .states import keep_inputs, num_sequences, state_rows


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
    """See ``reference.compress``."""
    state, kept, rows = states[sizes.state], states[sizes.inputs], state_rows(batch)
    assert x.stride(1) == 1 and bias.is_contiguous() and x.shape[1] == 2 * sizes.channels == state.shape[2]
    assert state.shape[1] == sizes.span and x.dtype is state.dtype and bias.dtype is norm.dtype is torch.float32
    _kernels.compress(
        rows,
        x.data_ptr(),
        state.data_ptr(),
        kept.data_ptr(),
        bias.data_ptr(),
        norm.data_ptr(),
        batch.positions.data_ptr(),
        table.data_ptr(),
        cache.data.data_ptr(),
        batch.slot_mapping.data_ptr(),
        num_sequences(batch),
        x.stride(0),
        sizes.dim,
        sizes.rate,
        kept.shape[1],
        table.shape[1],
        cache.spec.head_dim,
        sizes.offset,
        sizes.eps,
        sizes.overlap,
        DTYPE_CODES[x.dtype],
    )
    keep_inputs(rows, x, kept, batch)


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
    spec = cache.spec
    heads, dim = (0, 0) if q is None else q.shape[1:]
    assert q is None or (q.is_contiguous() and weights is not None and weights.is_contiguous())
    starts, counts = empty((tokens + 1,), torch.int32), empty((tokens,), torch.int32)
    slots = empty((tokens, window + top_k), torch.int32)
    _kernels.select_keys(
        0 if q is None else q.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        cache.data.data_ptr(),
        metadata.block_tables.data_ptr(),
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        starts.data_ptr(),
        counts.data_ptr(),
        slots.data_ptr(),
        metadata.seq_lens.shape[0],
        heads,
        dim,
        spec.head_dim,
        spec.block_size,
        metadata.block_tables.shape[1],
        top_k,
        scale,
        DTYPE_CODES[getattr(torch, spec.dtype)],
        rate,
        window,
        2 if rate else 1,
    )
    return AttentionMetadata(starts, counts, slots)


def compressed_attention(
    q: Tensor, cache: LayerCache, selection: AttentionMetadata, scale: float, sinks: Tensor
) -> Tensor:
    """See ``reference.compressed_attention``."""
    spec, options = cache.spec, AttentionOptions(scale, sinks=sinks)
    assert q.is_contiguous() and q.shape[2] == spec.latent
    parts = 2 if spec.index_dim else 1
    attended: Tensor = attention(q, cache, selection, options, row=spec.head_dim, parts=parts)
    return attended.view(q.shape)


def rotate_tail(x: Tensor, positions: Tensor, table: Tensor, inverse: bool = False) -> None:
    """See ``reference.rotate_tail``."""
    assert x.is_contiguous()
    tokens, heads, dim = x.shape
    pointers = x.data_ptr(), positions.data_ptr(), table.data_ptr()
    _kernels.rotate_tail(*pointers, tokens, heads, dim, table.shape[1], inverse, DTYPE_CODES[x.dtype])
