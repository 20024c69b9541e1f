"""The KV cache, and copies between the cache and transfer buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import SCALE_BYTES, KVSpec, TransferLayout

from ..scale_search import MIN_MAGNITUDE

KVCache = list[Tensor]
"""KV cache of each layer, ``[vectors, blocks, block_size, kv_heads, head_dim]`` (``KVSpec.vectors``). A quantized cache
is int8 or float8_e4m3fn, and its last dimension ends with the four bytes of the vector's float32 scale."""
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Dtypes of quantized caches, by ``KVSpec.quantization``."""
CACHE_LIMITS = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""Largest value of a quantized vector, by dtype."""


def new_kv_cache(specs: Sequence[KVSpec], blocks: int, device: torch.device) -> KVCache:
    """Allocate a KV cache with ``blocks`` blocks per layer, one layer per spec."""

    def empty(spec: KVSpec) -> Tensor:
        size = spec.head_dim + SCALE_BYTES if spec.quantization else spec.head_dim
        dtype = CACHE_DTYPES[spec.quantization] if spec.quantization else getattr(torch, spec.dtype)
        return torch.zeros((spec.vectors, blocks, spec.block_size, spec.kv_heads, size), dtype=dtype, device=device)

    return [empty(spec) for spec in specs]


def store_kv(cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values ``[tokens, kv_heads, head_dim]`` to a layer's cache at ``Batch.slot_mapping``.

    In a quantized cache, the vector of each token and head is scaled so that its largest magnitude is 127 (int8) or 448
    (fp8), and rounded.
    """
    for slots, vectors in zip(cache.flatten(1, 2), (k, v), strict=True):
        store_vectors(slots, vectors, slot_mapping)


def store_vectors(slots: Tensor, vectors: Tensor, slot_mapping: Tensor) -> None:
    """Write vectors to ``slots``, ``[slots, kv_heads, head_dim]``, quantized if the cache is."""
    if slots.dtype in CACHE_LIMITS:
        slots.view(torch.int8)[slot_mapping] = quantize(vectors, slots.dtype)
    else:
        slots[slot_mapping] = vectors.to(slots.dtype)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize vectors of the last dimension, and append the four bytes of their float32 scales; viewed as int8."""
    maximum, limit = x.float().abs().amax(-1, keepdim=True), CACHE_LIMITS[dtype]
    inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, limit) / maximum, 0)
    scaled = x.float() * inverse
    values = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return torch.cat((values.view(torch.int8), (maximum / limit).view(torch.int8)), -1)


def dequantize(vectors: Tensor) -> Tensor:
    """Convert vectors of a cache to float32."""
    if vectors.dtype not in CACHE_LIMITS:
        return vectors.float()
    values, scales = vectors.view(torch.int8).split([vectors.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    dequantized: Tensor = values.contiguous().view(vectors.dtype).float() * scales.contiguous().view(torch.float32)
    return dequantized


def gather_kv(cache: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence's first ``length`` tokens, ``[length, kv_heads, head_dim]`` each; float32 if the
    cache is quantized.

    Args:
        block_table: ``[blocks]`` int32: the sequence's blocks, a row of ``AttentionMetadata.block_tables``.
    """
    blocks = block_table[: -(-length // cache.shape[2])].long()
    k, v = (cache[part, blocks].flatten(0, 1)[:length] for part in range(2))
    return (dequantize(k), dequantize(v)) if cache.dtype in CACHE_LIMITS else (k, v)


def export_kv(
    cache: Tensor,
    slot_mapping: Tensor,
    buffer: Tensor,
    places: Tensor,
    layout: TransferLayout,
    progress: Tensor | None = None,
) -> None:
    """Copy keys and values of tokens from a layer's cache, which holds the heads of this rank, to a transfer buffer.

    A captured step uses the ``slot_mapping`` and ``export_places`` of its current batch.

    Args:
        slot_mapping: slots of the tokens (``Batch.slot_mapping``).
        buffer: ``[bytes]`` uint8.
        places: positions in the buffer (``Batch.export_places``); tokens with a negative entry are not copied.
        layout: layout of this layer.
        progress: ``[1]`` int64, incremented (with release order) after the copy unless no token was copied.
    """
    exported = (places >= 0).nonzero()[:, 0]
    if not len(exported):
        return
    layer, index = _transfer_view(buffer, layout), places[exported].cpu()
    rows = cache.flatten(1, 2)[:, slot_mapping[exported]].contiguous().view(torch.uint8).cpu()
    heads = slice(layout.first_head, layout.first_head + rows.shape[2])
    for vector in range(layout.vectors):
        layer[index // layout.slot_tokens, vector, index % layout.slot_tokens, heads] = rows[vector]
    if progress is not None:
        progress += 1


def import_kv(cache: Tensor, slot_mapping: Tensor, buffer: Tensor, places: Tensor, layout: TransferLayout) -> None:
    """Copy keys and values of tokens from a transfer buffer to a layer's cache, with the arguments of ``export_kv``."""
    imported = (places >= 0).nonzero()[:, 0]
    layer, index, slots = _transfer_view(buffer, layout), places[imported].cpu(), slot_mapping[imported]
    heads = slice(layout.first_head, layout.first_head + cache.shape[3])
    for vector, flat in enumerate(cache.flatten(1, 2)):
        rows = layer[index // layout.slot_tokens, vector, index % layout.slot_tokens, heads]
        flat[slots] = rows.contiguous().view(cache.dtype).to(cache.device)


def _transfer_view(buffer: Tensor, layout: TransferLayout) -> Tensor:
    """View one layer of a transfer buffer: ``[slots, vectors, slot_tokens, kv_heads, vector_bytes]`` uint8."""
    shape = (layout.vectors, layout.slot_tokens, layout.kv_heads, layout.vector_bytes)
    slots = buffer[: len(buffer) // layout.slot_bytes * layout.slot_bytes].view(-1, layout.slot_bytes)
    layer: Tensor = slots[:, layout.offset : layout.offset + prod(shape)].unflatten(1, shape)
    return layer


def copy_blocks(source: KVCache, target: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy blocks of all layers from ``source`` to ``target``. Both may be the same cache, or on different devices.

    Args:
        pairs: ``(source block, target block)`` of each copy.
    """
    if not pairs:
        return
    sources, targets = (list(blocks) for blocks in zip(*pairs, strict=True))
    for layer, other in zip(source, target, strict=True):
        other[:, targets] = layer[:, sources].to(other.device)


def copy_slots(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the stored keys and values of tokens within a layer's cache.

    Args:
        sources, targets: slots, ``[tokens]`` int64, like ``Batch.slot_mapping``; a source must not be a target.
    """
    slots = cache.flatten(1, 2)
    slots[:, targets] = slots[:, sources]
