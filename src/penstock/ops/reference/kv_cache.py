"""The KV cache, and copies between it and transfer buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import SCALE_BYTES, KVSpec, TransferLayout

from ..scale_search import MIN_MAGNITUDE

KVCache = list[Tensor]
"""Keys and values of each layer: ``[vectors, blocks, block_size, kv_heads, head_dim]``, with ``KVSpec.vectors``.
A quantized cache is int8 or float8_e4m3fn, and its last dimension ends with the four bytes of the vector's float32
scale."""
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of quantized caches, by ``KVSpec.quantization``."""
CACHE_LIMITS = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""The largest number of a quantized vector."""


def new_kv_cache(specs: Sequence[KVSpec], blocks: int, device: torch.device) -> KVCache:
    """An empty KV cache of ``blocks`` blocks in each layer, one entry a spec."""

    def empty(spec: KVSpec) -> Tensor:
        size = spec.head_dim + SCALE_BYTES if spec.quantization else spec.head_dim
        dtype = CACHE_DTYPES[spec.quantization] if spec.quantization else getattr(torch, spec.dtype)
        return torch.zeros((spec.vectors, blocks, spec.block_size, spec.kv_heads, size), dtype=dtype, device=device)

    return [empty(spec) for spec in specs]


def store_kv(cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values ``[tokens, kv_heads, head_dim]`` into a layer's cache at ``Batch.slot_mapping``.

    A quantized cache divides the vector of each token and head by its largest magnitude over 127 (int8) or 448 (fp8),
    and rounds.
    """
    for part, given in zip(cache.flatten(1, 2), (k, v), strict=True):
        store_vectors(part, given, slot_mapping)


def store_vectors(part: Tensor, vectors: Tensor, slot_mapping: Tensor) -> None:
    if part.dtype in CACHE_LIMITS:
        part.view(torch.int8)[slot_mapping] = quantize(vectors, part.dtype)
    else:
        part[slot_mapping] = vectors.to(part.dtype)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The last dimension quantized, and the four bytes of its float32 scale; all viewed as int8."""
    maximum, limit = x.float().abs().amax(-1, keepdim=True), CACHE_LIMITS[dtype]
    inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, limit) / maximum, 0)
    scaled = x.float() * inverse
    numbers = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return torch.cat((numbers.view(torch.int8), (maximum / limit).view(torch.int8)), -1)


def dequantize(part: Tensor) -> Tensor:
    """The vectors of a part of a cache, float32."""
    if part.dtype not in CACHE_LIMITS:
        return part.float()
    numbers, scales = part.view(torch.int8).split([part.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    wide: Tensor = numbers.contiguous().view(part.dtype).float() * scales.contiguous().view(torch.float32)
    return wide


def export_kv(
    cache: Tensor,
    slot_mapping: Tensor,
    buffer: Tensor,
    places: Tensor,
    layout: TransferLayout,
    progress: Tensor | None = None,
) -> None:
    """Copy keys and values of tokens from a layer's cache, which has the heads of this rank, to a transfer buffer.

    A captured step makes the copies of its own batch's ``slot_mapping`` and ``export_places``.

    Args:
        slot_mapping: ``[tokens]`` int64, as ``Batch.slot_mapping``.
        buffer: ``[bytes]`` uint8.
        places: ``[tokens]`` int64, as ``Batch.export_places``; tokens with negative ones are left out.
        layout: of this layer.
        progress: ``[1]`` int64, to which 1 is added once all is copied (with release order), unless no token was.
    """
    chosen = (places >= 0).nonzero()[:, 0]
    if not len(chosen):
        return
    whole, index = _transfer_view(buffer, layout), places[chosen].cpu()
    rows = cache.flatten(1, 2)[:, slot_mapping[chosen]].contiguous().view(torch.uint8).cpu()
    heads = slice(layout.first_head, layout.first_head + rows.shape[2])
    for part in range(layout.vectors):
        whole[index // layout.slot_tokens, part, index % layout.slot_tokens, heads] = rows[part]
    if progress is not None:
        progress += 1


def import_kv(cache: Tensor, slot_mapping: Tensor, buffer: Tensor, places: Tensor, layout: TransferLayout) -> None:
    """Copy keys and values of tokens from a transfer buffer to a layer's cache; arguments as for ``export_kv``."""
    chosen = (places >= 0).nonzero()[:, 0]
    whole, index, slots = _transfer_view(buffer, layout), places[chosen].cpu(), slot_mapping[chosen]
    heads = slice(layout.first_head, layout.first_head + cache.shape[3])
    for part, flat in enumerate(cache.flatten(1, 2)):
        rows = whole[index // layout.slot_tokens, part, index % layout.slot_tokens, heads]
        flat[slots] = rows.contiguous().view(cache.dtype).to(cache.device)


def _transfer_view(buffer: Tensor, layout: TransferLayout) -> Tensor:
    """One layer's part of a transfer buffer: ``[slots, vectors, slot_tokens, kv_heads, vector_bytes]`` uint8."""
    shape = (layout.vectors, layout.slot_tokens, layout.kv_heads, layout.vector_bytes)
    slots = buffer[: len(buffer) // layout.slot_bytes * layout.slot_bytes].view(-1, layout.slot_bytes)
    part: Tensor = slots[:, layout.offset : layout.offset + prod(shape)].unflatten(1, shape)
    return part


def copy_blocks(source: KVCache, target: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy blocks of all layers from ``source`` to ``target``, which may be one cache, or on different devices.

    Args:
        pairs: ``(from, to)`` of each block.
    """
    if not pairs:
        return
    origins, goals = (list(blocks) for blocks in zip(*pairs, strict=True))
    for layer, other in zip(source, target, strict=True):
        other[:, goals] = layer[:, origins].to(other.device)


def copy_slots(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy keys and values of tokens within a layer's cache, as they are stored.

    Args:
        sources, targets: ``[tokens]`` int64, as ``Batch.slot_mapping``; no slot is in both.
    """
    slots = cache.flatten(1, 2)
    slots[:, targets] = slots[:, sources]
