"""Multi-head latent attention (MLA), and products with a separate matrix per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch import AttentionMetadata, AttentionOptions
from .attention import attention
from .elementwise import rope
from .kv_cache import CACHE_LIMITS, store_vectors
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
    index_keys: Tensor | None = None,
) -> None:
    """Apply the rotary embedding to the rotary parts of queries and key, and store each token's latent vector followed
    by its rotary key, and with sparse attention by its index key, in a latent cache.

    Args:
        q: ``[tokens, heads, rope_dim]``; only the last dimension must be contiguous.
        k, latent: ``[tokens, rope_dim]`` and ``[tokens, latent]``; rows may be strided.
        positions, table, interleaved: arguments of ``rope``.
        cache, slot_mapping: arguments of ``store_kv``.
        out: memory for the rotated queries, ``[tokens, heads, rope_dim]``; the last dimension must be contiguous.
        index_keys: ``[tokens, KVSpec.index_dim]``; rows may be strided. None: not stored.
    """
    out.copy_(rope(q, positions, table, interleaved))
    vectors = torch.cat((latent[:, None], rope(k[:, None], positions, table, interleaved)), -1)
    if index_keys is not None:
        vectors = torch.cat((vectors, index_keys[:, None]), -1)
    store_vectors(_without_index_keys(cache, vectors.shape[-1]).flatten(1, 2)[0], vectors, slot_mapping)


def _without_index_keys(cache: Tensor, size: int) -> Tensor:
    """The first ``size`` elements of the vectors. Quantized caches have no index keys."""
    return cache if cache.dtype in CACHE_LIMITS else cache[..., :size]


def latent_attention(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, latent: int, selected: bool = False
) -> Tensor:
    """Causal attention over a latent cache (MLA; DeepSeek-AI, 2024); returns ``[tokens, heads, latent]``.

    A token's cached vector is the key of all heads, and the first ``latent`` dimensions are the value of all heads.

    Args:
        q: ``[tokens, heads, head_dim]``.
        metadata: argument of ``attention``.
        scale: ``AttentionOptions.scale``.
        selected: ``metadata`` is a result of ``select_keys``. A query that attends to all positions has the same bits
            as in dense attention.
    """
    cache = _without_index_keys(cache, q.shape[2])
    if selected:
        cache = cache.flatten(1, 2).unsqueeze(2)  # blocks of one slot
    whole = attention(q, cache.expand(2, *cache.shape[1:]), metadata, AttentionOptions(scale))
    return whole.view(q.shape)[..., :latent]


def select_keys(
    q: Tensor, weights: Tensor, cache: Tensor, metadata: AttentionMetadata, top_k: int, scale: float
) -> AttentionMetadata:
    """Select the positions to which queries attend (DeepSeek Sparse Attention; DeepSeek-AI, 2025).

    The score of a position is the sum over the index heads of ``weight * scale * max(query * index key, 0)``. A query
    attends to the ``top_k`` positions with the largest scores up to its own; of positions with equal scores, to the
    first. The result does not depend on other queries.

    Args:
        q: index queries, ``[tokens, index_heads, index_dim]``.
        weights: ``[tokens, index_heads]`` float32.
        cache: latent cache with index keys.

    Returns:
        Metadata of a batch with one sequence per query: ``seq_lens`` are the numbers of selected positions, and rows of
        ``block_tables``, ``[tokens, top_k]``, hold their slots in order of position.
    """
    tokens, dim, block_size = len(q), q.shape[2], cache.shape[2]
    counts, slots = torch.zeros(tokens, dtype=torch.int32), torch.zeros((tokens, top_k), dtype=torch.int32)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for i, length in enumerate(lengths):
        positions = torch.arange(length, device=q.device)
        blocks = metadata.block_tables[i].long()
        slots_of_sequence = blocks[positions // block_size] * block_size + positions % block_size
        keys = cache[0].flatten(0, 1)[slots_of_sequence, 0, -dim:].float()
        for token in range(starts[i], starts[i + 1]):
            end = length - (starts[i + 1] - token) + 1
            scores = ((q[token].float() @ keys[:end].T).relu() * (weights[token, :, None] * scale)).sum(0)
            chosen = scores.sort(descending=True, stable=True).indices[:top_k].sort().values
            counts[token] = len(chosen)
            slots[token, : len(chosen)] = slots_of_sequence[chosen]
    return AttentionMetadata(torch.arange(tokens + 1, dtype=torch.int32), counts, slots).to(q.device)
