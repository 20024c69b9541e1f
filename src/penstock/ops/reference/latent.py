"""Latent attention, and matrices of each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch import AttentionMetadata, AttentionOptions
from .attention import attention
from .elementwise import rope
from .kv_cache import store_vectors
from .matrix import write


def pack_by_head(weight: Tensor) -> Tensor:
    """Pack a matrix for each head, ``[heads, out, in]``, for ``linear_by_head``."""
    return weight


def linear_by_head(x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """Each head by its own matrix: ``[tokens, heads, in]``, of which only the last dimension must be contiguous, to
    ``[tokens, heads, out]``.

    Args:
        matrices: of ``pack_by_head``.
        out: where to write the result; likewise.
    """
    return write(torch.einsum("thi,hoi->tho", x.float(), matrices.float()).to(x.dtype), out)


def latent_rope_and_store(
    q: Tensor,
    k: Tensor,
    latent: Tensor,
    positions: Tensor,
    table: Tensor,
    cache: Any,
    slot_mapping: Tensor,
    interleaved: bool,
    out: Tensor,
) -> None:
    """Apply the rotary embedding to the rotary parts of queries and key, and store each token's latent vector and,
    behind it, its key in a latent cache.

    Args:
        q: ``[tokens, heads, rope_dim]``, of which only the last dimension must be contiguous.
        k: ``[tokens, rope_dim]``; latent: ``[tokens, latent]``. Rows may lie apart.
        positions, table: as for ``rope``.
        cache, slot_mapping: as for ``store_kv``.
        interleaved: whether neighbours are rotated against each other, and not halves.
        out: ``[tokens, heads, rope_dim]``, where to write the queries; its last dimension must be contiguous.
    """
    out.copy_(rope(q, positions, table, interleaved))
    vectors = torch.cat((latent[:, None], rope(k[:, None], positions, table, interleaved)), -1)
    store_vectors(cache.flatten(1, 2)[0], vectors, slot_mapping)


def latent_attention(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, latent: int) -> Tensor:
    """Causal attention of all heads over a latent cache: each token's vector is the key of all heads, and its first
    ``latent`` numbers are their value (DeepSeek-AI, 2024). Returns ``[tokens, heads, latent]``.

    Args:
        q: ``[tokens, heads, head_dim]``.
        metadata, scale: as for ``attention``.
    """
    whole = attention(q, cache.expand(2, *cache.shape[1:]), metadata, AttentionOptions(scale))
    return whole.view(q.shape)[..., :latent]
