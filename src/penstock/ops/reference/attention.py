"""Attention over a KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch import AttentionMetadata, AttentionOptions, QKNorms
from .elementwise import rms_norm, rope
from .kv_cache import dequantize, store_kv


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    cache: Any,
    slot_mapping: Tensor,
    norms: QKNorms | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Norm queries and keys of each head, if ``norms`` are given, apply the rotary embedding, and store keys and values
    in a layer's cache. Returns the queries, ``[tokens, heads, head_dim]``.

    Args:
        q: ``[tokens, heads, head_dim]``; k, v: ``[tokens, kv_heads, head_dim]``. Rows may lie apart.
        positions, table, interleaved: as for ``rope``.
        cache, slot_mapping: as for ``store_kv``.
    """
    if norms:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    q, k = rope(q, positions, table, interleaved), rope(k, positions, table, interleaved)
    store_kv(cache, k, v, slot_mapping)
    return q


def attention(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions, out: Tensor | None = None
) -> Tensor:
    """Attention of every query over its own sequence's cached keys and values; ``[tokens, heads * head_dim]``.

    Over a quantized cache, a backend may quantize queries and softmax weights to 8 bits, too.

    Args:
        q: ``[tokens, heads, head_dim]``; ``heads`` is a multiple of the cache's.
        out: as for ``linear``.
    """
    window, softcap, sinks = options.window, options.softcap, options.sinks
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[3]
    out = q.new_empty(q.shape[0], heads * dim) if out is None else out
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        blocks = metadata.block_tables[i, : -(-length // cache.shape[2])].long()
        k, v = (dequantize(part[blocks].flatten(0, 1)[:length]) for part in cache)
        own = q[rows].float().view(-1, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("tkgd,skd->kgts", own, k) * options.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length, device=q.device)
        position = at[length - len(own) :, None]
        hidden = at > (position if options.causal else position + window - 1 if window else length)
        if metadata.key_ends is not None:
            hidden = at >= metadata.key_ends[rows, None]
        if window:
            hidden |= at < position // window * window if options.chunked else at <= position - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :length]
        out[rows] = torch.einsum("kgts,skd->tkgd", weights, v).flatten(1).to(q.dtype)
    return out
