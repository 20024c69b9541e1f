"""The paged KV cache and attention over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import KVSpec, TransferLayout
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .. import _kernels, pages
from ..batch import AttentionMetadata, AttentionOptions, QKNorms
from ..reference.kv_cache import dequantize
from .dtypes import DTYPE_CODES, dtype_code
from .elementwise import rms_norm, rope
from .graph import empty


@dataclass(frozen=True)
class LayerCache:
    """KV cache of one layer."""

    data: Tensor
    """``[blocks, bytes_per_block]`` uint8, in the layout of the kernels."""
    spec: KVSpec


def new_kv_cache(specs: Sequence[KVSpec], blocks: int, device: torch.device) -> list[LayerCache]:
    """See ``reference.new_kv_cache``. Raises ``PenstockError`` for unsupported block sizes, head sizes and dtypes."""
    for spec in specs:
        dtype_code(getattr(torch, spec.dtype))
        if spec.block_size % 16 or spec.block_size > _kernels.MAX_BLOCK:
            message = f"must be a multiple of 16, at most {_kernels.MAX_BLOCK}, is {spec.block_size}"
            raise invalid("block_size", message, _kernels.MAX_BLOCK)
        if spec.quantization not in ("", "int8"):
            message = f"a KV cache in {spec.quantization} is not supported on CPUs; int8 uses the same amount of memory"
            raise PenstockError(Code.UNSUPPORTED, message, "kv_cache_dtype")
        if spec.latent:
            _check_latent(spec)
        elif spec.head_dim % 16 or spec.head_dim > _kernels.MAX_HEAD:
            message = f"head_dim {spec.head_dim}; supported are multiples of 16 up to {_kernels.MAX_HEAD}"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    return [LayerCache(pages.zeros(blocks * s.bytes_per_block).view(blocks, s.bytes_per_block), s) for s in specs]


def _check_latent(spec: KVSpec) -> None:
    """Raise ``PenstockError`` (``unsupported``) for unsupported sizes of latent vectors."""
    max_latent, max_key = _kernels.MAX_LATENT, _kernels.MAX_LATENT_KEY
    key = spec.head_dim - spec.index_dim
    if spec.latent % 16 or key % 16 or spec.latent > max_latent or key > max_key:
        message = (
            f"latent vectors have the size {spec.latent}, and {key} with the rotary key; CPU kernels support "
            f"multiples of 16 up to {max_latent} and {max_key}"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "model")


def store_kv(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.store_kv``."""
    spec = cache.spec
    _kernels.store(
        k.data_ptr(),
        v.data_ptr(),
        cache.data.data_ptr(),
        slot_mapping.data_ptr(),
        k.shape[0],
        spec.kv_heads,
        spec.head_dim,
        spec.block_size,
        k.stride(0),
        v.stride(0),
        DTYPE_CODES[k.dtype],
        bool(spec.quantization),
    )


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    norms: QKNorms | None = None,
    interleaved: bool = False,
) -> Tensor:
    """See ``reference.rope_and_store``. In a captured graph, all its kernels run on a few tokens before the next
    tokens."""
    if norms:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    q, k = rope(q, positions, table, interleaved), rope(k, positions, table, interleaved)
    store_kv(cache, k, v, slot_mapping)
    return q


def attention(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    out: Tensor | None = None,
    row: int = 0,
    parts: int = 1,
) -> Tensor:
    """See ``reference.attention``. Returns ``[tokens, heads * latent]`` for a latent cache.

    Args:
        row: elements between the vectors of a latent cache, if ``metadata`` is a result of ``select_keys`` or
            ``select_entries``; else 0.
        parts: vectors of a slot, with ``row``.
    """
    spec, heads = cache.spec, q.shape[1]
    out = empty((q.shape[0], heads * (spec.latent or spec.head_dim)), q.dtype) if out is None else out
    _kernels.attention(
        q.data_ptr(),
        out.data_ptr(),
        cache.data.data_ptr(),
        metadata.block_tables.data_ptr(),
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.seq_lens.shape[0],
        heads,
        spec.kv_heads,
        q.shape[2],
        spec.block_size,
        metadata.block_tables.shape[1],
        options.window,
        out.stride(0),
        options.scale,
        DTYPE_CODES[q.dtype],
        bool(spec.quantization),
        options.softcap,
        0 if options.sinks is None else options.sinks.data_ptr(),
        spec.latent,
        options.causal,
        0 if metadata.key_ends is None else metadata.key_ends.data_ptr(),
        options.chunked,
        0 if options.alibi is None else options.alibi.data_ptr(),
        row,
        parts,
    )
    return out


def export_kv(
    cache: LayerCache,
    slot_mapping: Tensor,
    buffer: Tensor,
    places: Tensor,
    layout: TransferLayout,
    progress: Tensor | None = None,
) -> None:
    """See ``reference.export_kv``."""
    _transfer(_kernels.export_kv, cache, slot_mapping, buffer, places, layout, progress)


def import_kv(cache: LayerCache, slot_mapping: Tensor, buffer: Tensor, places: Tensor, layout: TransferLayout) -> None:
    """See ``reference.import_kv``."""
    _transfer(_kernels.import_kv, cache, slot_mapping, buffer, places, layout, None)


def _transfer(
    kernel: Callable[..., None],
    cache: LayerCache,
    slot_mapping: Tensor,
    buffer: Tensor,
    places: Tensor,
    layout: TransferLayout,
    progress: Tensor | None,
) -> None:
    """Call the kernel of ``export_kv`` or ``import_kv``."""
    spec = cache.spec
    assert spec.bytes_per_vector == layout.vector_bytes
    assert layout.first_head + spec.kv_heads <= layout.kv_heads
    assert slot_mapping.dtype == places.dtype == torch.int64
    kernel(
        cache.data.data_ptr(),
        buffer.data_ptr(),
        slot_mapping.data_ptr(),
        places.data_ptr(),
        slot_mapping.shape[0],
        spec.kv_heads,
        spec.head_dim,
        spec.block_size,
        layout.kv_heads,
        layout.first_head,
        layout.slot_tokens,
        layout.slot_bytes,
        layout.offset,
        dtype_code(getattr(torch, spec.dtype)),
        bool(spec.quantization),
        bool(spec.latent),
        0 if progress is None else progress.data_ptr(),
    )


def gather_kv(cache: LayerCache, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """See ``reference.gather_kv``. Tokens are exported to a temporary buffer."""
    spec = cache.spec
    blocks = block_table[: -(-length // spec.block_size)].long()
    slots = (blocks[:, None] * spec.block_size + torch.arange(spec.block_size)).flatten()[:length].contiguous()
    layout = TransferLayout(length, length * spec.bytes_per_token, 0, spec.kv_heads, spec.bytes_per_vector)
    buffer = torch.empty(layout.slot_bytes, dtype=torch.uint8)
    export_kv(cache, slots, buffer, torch.arange(length), layout)
    dtype = torch.int8 if spec.quantization else getattr(torch, spec.dtype)
    k, v = buffer.view(dtype).view(2, length, spec.kv_heads, -1)
    return (dequantize(k), dequantize(v)) if spec.quantization else (k, v)


def copy_slots(cache: LayerCache, sources: Tensor, targets: Tensor) -> None:
    """See ``reference.copy_slots``. Tokens are exported to a temporary buffer and imported from it."""
    spec, count = cache.spec, len(sources)
    size = count * spec.bytes_per_token
    layout = TransferLayout(count, size, 0, spec.kv_heads, spec.bytes_per_vector, vectors=spec.vectors)
    buffer, places = torch.empty(size, dtype=torch.uint8), torch.arange(count)
    export_kv(cache, sources, buffer, places, layout)
    import_kv(cache, targets, buffer, places, layout)


def copy_blocks(source: list[LayerCache], target: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
    """See ``reference.copy_blocks``."""
    if not pairs:
        return
    sources, targets = (list(blocks) for blocks in zip(*pairs, strict=True))
    for layer, other in zip(source, target, strict=True):
        other.data[targets] = layer.data[sources]
