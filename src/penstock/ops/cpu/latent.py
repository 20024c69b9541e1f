"""Multi-head latent attention (MLA): products with a separate matrix per head, and the latent KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from .. import _kernels
from ..batch import AttentionMetadata, AttentionOptions
from .compressed import select_entries
from .dtypes import DTYPE_CODES
from .graph import empty
from .kv_cache import LayerCache, attention
from .matrix import Matrix, pack


@dataclass(frozen=True)
class HeadMatrices:
    """A separate matrix ``[out, in]`` per head."""

    stacked: Matrix
    """Stacked matrices, each padded to whole panels."""
    heads: int
    """Number of heads."""
    outputs: int
    """Number of outputs per head, without padding."""


def pack_by_head(weight: Tensor) -> HeadMatrices:
    """See ``reference.pack_by_head``."""
    heads, outputs, _ = weight.shape
    stacked = pad(weight, (0, 0, 0, -outputs % _kernels.PANEL)).flatten(0, 1)
    return HeadMatrices(pack([stacked]), heads, outputs)


def linear_by_head(x: Tensor, matrices: HeadMatrices, out: Tensor | None = None) -> Tensor:
    """See ``reference.linear_by_head``."""
    tokens, heads, _ = x.shape
    out = empty((tokens, heads, matrices.outputs), x.dtype) if out is None else out
    assert heads == matrices.heads and x.stride(2) == out.stride(2) == 1
    _kernels.linear_by_head(
        x.data_ptr(),
        matrices.stacked.native,
        out.data_ptr(),
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        tokens,
        heads,
        matrices.outputs,
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
    """See ``reference.latent_rope_and_store``."""
    spec, (tokens, heads, rope_dim) = cache.spec, q.shape
    assert q.stride(2) == k.stride(1) == latent.stride(1) == out.stride(2) == 1
    assert index_keys is None or index_keys.stride(1) == 1
    _kernels.latent_store(
        q.data_ptr(),
        k.data_ptr(),
        latent.data_ptr(),
        out.data_ptr(),
        positions.data_ptr(),
        table.data_ptr(),
        cache.data.data_ptr(),
        slot_mapping.data_ptr(),
        tokens,
        heads,
        rope_dim,
        spec.head_dim - spec.index_dim,
        spec.block_size,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        latent.stride(0),
        out.stride(0),
        out.stride(1),
        interleaved,
        DTYPE_CODES[q.dtype],
        bool(spec.quantization),
        0 if index_keys is None else index_keys.data_ptr(),
        spec.index_dim,
        0 if index_keys is None else index_keys.stride(0),
    )


def latent_attention(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, scale: float, latent: int, selected: bool = False
) -> Tensor:
    """See ``reference.latent_attention``."""
    assert q.is_contiguous() and latent == cache.spec.latent
    row = cache.spec.head_dim if selected else 0
    attended: Tensor = attention(q, cache, metadata, AttentionOptions(scale), row=row).unflatten(1, (-1, latent))
    return attended


def select_keys(
    q: Tensor, weights: Tensor, cache: LayerCache, metadata: AttentionMetadata, top_k: int, scale: float
) -> AttentionMetadata:
    """See ``reference.select_keys``."""
    assert q.shape[2] == cache.spec.index_dim
    return select_entries(cache, metadata, len(q), 0, 0, top_k, q, weights, scale)
