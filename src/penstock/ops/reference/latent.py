"""Multi-head latent attention (MLA), and products with a separate matrix per head."""

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
    """Pack a separate matrix for each head, ``[heads, out, in]``, for ``linear_by_head``."""
    return weight


def linear_by_head(x: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply each head by its matrix: ``[tokens, heads, in]`` to ``[tokens, heads, out]``. Only the last dimension of
    ``x`` and ``out`` must be contiguous.

    Args:
        matrices: result of ``pack_by_head``.
        out: memory for the result; None: allocate it.
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
    """Apply the rotary embedding to the rotary parts of queries and key, and store each token's latent vector followed
    by its rotary key in a latent cache.

    Args:
        q: ``[tokens, heads, rope_dim]``; only the last dimension must be contiguous.
        k, latent: ``[tokens, rope_dim]`` and ``[tokens, latent]``; rows may be strided.
        positions, table, interleaved: arguments of ``rope``.
        cache, slot_mapping: arguments of ``store_kv``.
        out: memory for the rotated queries, ``[tokens, heads, rope_dim]``; the last dimension must be contiguous.
    """
    out.copy_(rope(q, positions, table, interleaved))
    vectors = torch.cat((latent[:, None], rope(k[:, None], positions, table, interleaved)), -1)
    store_vectors(cache.flatten(1, 2)[0], vectors, slot_mapping)


def latent_attention(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, latent: int) -> Tensor:
    """Causal attention over a latent cache (MLA; DeepSeek-AI, 2024); returns ``[tokens, heads, latent]``.

    A token's cached vector is the key of all heads, and the first ``latent`` dimensions are the value of all heads.

    Args:
        q: ``[tokens, heads, head_dim]``.
        metadata: argument of ``attention``.
        scale: ``AttentionOptions.scale``.
    """
    whole = attention(q, cache.expand(2, *cache.shape[1:]), metadata, AttentionOptions(scale))
    return whole.view(q.shape)[..., :latent]
