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
    """Apply norms (if given) and rotary embedding to queries and keys, and store keys and values in a layer's cache.
    Returns the queries, ``[tokens, heads, head_dim]``.

    Args:
        q: ``[tokens, heads, head_dim]``. Rows of ``q``, ``k`` and ``v`` may be strided.
        k, v: ``[tokens, kv_heads, head_dim]``.
        positions, table, interleaved: arguments of ``rope``.
        cache, slot_mapping: arguments of ``store_kv``.
    """
    if norms:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    q, k = rope(q, positions, table, interleaved), rope(k, positions, table, interleaved)
    store_kv(cache, k, v, slot_mapping)
    return q


def attention(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions, out: Tensor | None = None
) -> Tensor:
    """Attention of queries over the cached keys and values of their sequences; returns ``[tokens, heads * head_dim]``.

    With a quantized cache, a backend may also quantize queries and softmax weights to 8 bits.

    Args:
        q: ``[tokens, heads, head_dim]``; ``heads`` is a multiple of the cache's ``kv_heads``.
        out: memory for the result (see ``linear``).
    """
    window, softcap, sinks = options.window, options.softcap, options.sinks
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[3]
    out = q.new_empty(q.shape[0], heads * dim) if out is None else out
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        blocks = metadata.block_tables[i, : -(-length // cache.shape[2])].long()
        k, v = (dequantize(vectors[blocks].flatten(0, 1)[:length]) for vectors in cache)
        queries = q[rows].float().view(-1, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("tkgd,skd->kgts", queries, k) * options.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        key_position = torch.arange(length, device=q.device)
        position = key_position[length - len(queries) :, None]
        masked = key_position > (position if options.causal else position + window - 1 if window else length)
        if metadata.key_ends is not None:
            masked = key_position >= metadata.key_ends[rows, None]
        if window:
            first = position // window * window if options.chunked else position - window + 1
            masked |= key_position < first
        if options.alibi is not None:
            scores = scores + options.alibi.view(kv_heads, -1, 1, 1) * (key_position - position)
        scores = scores.masked_fill(masked, float("-inf"))
        if sinks is not None:
            sink = sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :length]
        out[rows] = torch.einsum("kgts,skd->tkgd", weights, v).flatten(1).to(q.dtype)
    return out
