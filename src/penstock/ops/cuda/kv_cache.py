"""The paged KV cache: stores, and copies of blocks and tokens."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import SCALE_BYTES, KVSpec, TransferLayout, bytes_per_block
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .. import pages
from ..batch import QKNorms
from ..reference.kv_cache import CACHE_DTYPES
from .elementwise import power_of_two, rms_norm, rope
from .kernels import kv_cache as kernels
from .launch import MIN_FP8, architecture, launch

MAX_BLOCK = 128
"""Largest number of tokens of a block."""
MAX_HEAD = 512
"""Largest head size."""
MAX_LATENT = 512
"""Largest value size of a latent cache."""
MAX_LATENT_KEY = 768
"""Largest key size of a latent cache."""


@dataclass(frozen=True)
class LayerCache:
    """KV cache of one layer, as views of ``pool``."""

    values: Tensor
    """``[blocks, vectors, kv_heads, block_size, head_dim]`` (``KVSpec.vectors``); blocks are strided."""
    scales: Tensor | None
    """``[blocks, vectors, kv_heads, block_size]`` float32 if the cache is quantized, else None."""
    spec: KVSpec
    pool: Tensor
    """``[blocks, bytes]`` uint8: a block contains all layers consecutively, so that one copy moves all layers."""


def new_kv_cache(specs: Sequence[KVSpec], blocks: int, device: torch.device) -> list[LayerCache]:
    """See ``reference.new_kv_cache``. Memory on the CPU is page-locked, so that the GPU can access it.

    Raises ``PenstockError`` for block sizes and head sizes without kernels.
    """
    for spec in specs:
        if spec.block_size % 16 or spec.block_size > MAX_BLOCK:
            message = f"must be a multiple of 16, at most {MAX_BLOCK}, is {spec.block_size}"
            raise invalid("block_size", message, MAX_BLOCK)
        if spec.quantization == "fp8" and architecture(device).capability < MIN_FP8:
            found = "{}.{}".format(*architecture(device).capability)
            message = f"kv_cache_dtype fp8 requires a GPU of compute capability 8.9 or higher, not {found}: use int8"
            raise PenstockError(Code.UNSUPPORTED, message, "kv_cache_dtype")
        largest, size = MAX_LATENT_KEY if spec.latent else MAX_HEAD, spec.head_dim - spec.index_dim
        if size % 16 or size > largest or spec.latent % 16 or spec.latent > MAX_LATENT:
            message = f"head_dim {size}; supported are multiples of 16 up to {largest}"
            if spec.latent:
                message += f", and latent sizes up to {MAX_LATENT}"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    size = bytes_per_block(specs)
    if device.type == "cpu":
        pool = page_locked(pages.zeros(blocks * size).view(blocks, size))
    else:
        pool = torch.zeros((blocks, size), dtype=torch.uint8, device=device)
    offsets = accumulate((spec.bytes_per_block for spec in specs), initial=0)
    return [_layer_cache(pool, offset, spec) for offset, spec in zip(offsets, specs, strict=False)]


def _layer_cache(pool: Tensor, offset: int, spec: KVSpec) -> LayerCache:
    """Views of a layer that begins at byte ``offset`` of each block."""
    dtype = CACHE_DTYPES[spec.quantization] if spec.quantization else getattr(torch, spec.dtype)
    shape = (spec.vectors, spec.kv_heads, spec.block_size, spec.head_dim)
    end = offset + prod(shape) * dtype.itemsize
    values = pool[:, offset:end].view(dtype).unflatten(1, shape)
    if not spec.quantization:
        return LayerCache(values, None, spec, pool)
    scales = pool[:, end : end + prod(shape[:3]) * SCALE_BYTES].view(torch.float32).unflatten(1, shape[:3])
    return LayerCache(values, scales, spec, pool)


def page_locked(memory: Tensor) -> Tensor:
    """Page-lock host memory for access by the GPU, for the lifetime of the tensor ``memory``.

    The memory is registered, since PyTorch would round the size of page-locked allocations up to a power of two.
    """
    if memory.numel() and torch.cuda.is_available() and not memory.is_pinned():
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        if error := int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
            message = f"cannot page-lock {memory.nbytes >> 20} MiB of host memory (CUDA error {error})"
            remedy = "set a lower swap_space, kv_offloading_size or kv_buffer_size"
            raise PenstockError(Code.UNSUPPORTED, f"{message}: {remedy}")
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def store_kv(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.store_kv``. Tokens with negative slots are not stored."""
    spec = cache.spec
    assert k.stride()[1:] == v.stride()[1:] == (spec.head_dim, 1) or spec.kv_heads == 1
    launch(
        kernels.store_kv,
        (k.shape[0], spec.kv_heads),
        k,
        v,
        cache.values,
        cache.scales,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        *block_strides(cache),
        KV_HEADS=spec.kv_heads,
        HALF=spec.head_dim // 2,
        PAGE=spec.block_size,
        QUANTIZATION=spec.quantization,
        BLOCK=power_of_two(spec.head_dim // 2),
        num_warps=1,
    )


def block_strides(cache: LayerCache) -> tuple[int, int]:
    """Distance of two blocks in elements, for values and for scales (0 without scales)."""
    return cache.values.stride(0), 0 if cache.scales is None else cache.scales.stride(0)


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
    """See ``reference.rope_and_store``. Tokens with negative slots are padding. A single kernel does all this, unless
    the rotation is interleaved or partial, or norms have float32 weights in a model of another dtype."""
    wide = norms is not None and norms.q_weight.dtype is not q.dtype
    if interleaved or wide or table.shape[1] < q.shape[2]:
        if norms:
            q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
        q, k = rope(q, positions, table, interleaved), rope(k, positions, table, interleaved)
        store_kv(cache, k, v, slot_mapping)
        return q
    spec = cache.spec
    tokens, heads, dim = q.shape
    assert q.stride()[1:] == (dim, 1) and (k.stride()[1:] == v.stride()[1:] == (dim, 1) or spec.kv_heads == 1)
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    group = heads // spec.kv_heads
    rows, block = power_of_two(group), power_of_two(dim)
    launch(
        kernels.rope_and_store,
        (tokens, spec.kv_heads),
        q,
        k,
        v,
        positions,
        table,
        cache.values,
        cache.scales,
        slot_mapping,
        norms.q_weight if norms else None,
        norms.k_weight if norms else None,
        out,
        norms.eps if norms else 0.0,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *block_strides(cache),
        GROUP=group,
        KV_HEADS=spec.kv_heads,
        HALF=dim // 2,
        PAGE=spec.block_size,
        QUANTIZATION=spec.quantization,
        ROWS=rows,
        HALF_BLOCK=power_of_two(dim // 2),
        BLOCK=block,
        num_warps=min(max(rows * block // 512, 1), 8),
    )
    return out


def copy_blocks(source: list[LayerCache], target: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
    """See ``reference.copy_blocks``. All layers of a block are copied together.

    Copies run on the current stream, and the caller need not wait for them. A separate stream would save no time: the
    next step writes to blocks that were copied out, and reads blocks that were copied in.
    """
    if not pairs:
        return
    source_pool, target_pool = source[0].pool, target[0].pool
    for start, other, count in _runs(pairs):
        target_pool[other : other + count].copy_(source_pool[start : start + count], non_blocking=True)


def copy_slots(cache: LayerCache, sources: Tensor, targets: Tensor) -> None:
    """See ``reference.copy_slots``."""
    size = cache.spec.block_size
    source, target = ((slots // size, slice(None), slice(None), slots % size) for slots in (sources, targets))
    for tensor in (cache.values.view(torch.uint8), cache.scales):
        if tensor is not None:
            tensor[target] = tensor[source]


def gather_kv(cache: LayerCache, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """See ``reference.gather_kv``."""
    blocks = block_table[: -(-length // cache.spec.block_size)].long()

    def tokens(part: int) -> Tensor:
        if cache.scales is None:
            vectors = cache.values[blocks, part]
        else:
            vectors = cache.values.view(torch.uint8)[blocks, part].view(cache.values.dtype).float()
            vectors = vectors * cache.scales[blocks, part, :, :, None]
        return vectors.transpose(1, 2).flatten(0, 1)[:length]

    return tokens(0), tokens(1)


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Merge pairs into runs of consecutive blocks: ``(source, target, count)``."""
    runs: list[tuple[int, int, int]] = []
    for a, b in pairs:
        if runs and (a, b) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((a, b, 1))
    return runs


def export_kv(
    cache: LayerCache,
    slot_mapping: Tensor,
    buffer: Tensor,
    places: Tensor,
    layout: TransferLayout,
    progress: Tensor | None = None,
) -> None:
    """See ``reference.export_kv``. The GPU writes to the buffer directly. This call waits for the GPU, and therefore
    cannot be captured in a graph.

    Args:
        buffer: transfer buffer in host memory. The first call page-locks it, for the lifetime of the tensor.
        places: positions, in host memory or on the device.
        progress: counter in host memory.
    """
    _transfer(cache, slot_mapping, buffer, places, layout, False)
    if progress is not None and bool((places >= 0).any()):
        progress += 1


def import_kv(cache: LayerCache, slot_mapping: Tensor, buffer: Tensor, places: Tensor, layout: TransferLayout) -> None:
    """See ``reference.import_kv``. The arguments are those of ``export_kv``, and this call waits for the GPU, too."""
    _transfer(cache, slot_mapping, buffer, places, layout, True)


def _transfer(
    cache: LayerCache, slot_mapping: Tensor, buffer: Tensor, places: Tensor, layout: TransferLayout, into_cache: bool
) -> None:
    """Copy between the cache and a transfer buffer, and wait for the copy."""
    spec = cache.spec
    elements = spec.head_dim * cache.values.itemsize // 4
    assert spec.bytes_per_vector == layout.vector_bytes
    assert layout.first_head + spec.kv_heads <= layout.kv_heads
    scale_stride = block_strides(cache)[1]
    launch(
        kernels.transfer_kv,
        (len(places), spec.vectors),
        cache.values.view(torch.int32),
        None if cache.scales is None else cache.scales.view(torch.int32),
        slot_mapping,
        page_locked(buffer)[: len(buffer) // 4 * 4].view(torch.int32),
        places.to(cache.values.device),  # kernels can read host memory only if it is page-locked
        cache.values.stride(0) * cache.values.itemsize // 4,
        scale_stride,
        layout.slot_bytes // 4,
        layout.offset // 4,
        layout.kv_heads,
        layout.first_head,
        SLOT_TOKENS=layout.slot_tokens,
        KV_HEADS=spec.kv_heads,
        ELEMENTS=elements,
        PAGE=spec.block_size,
        QUANTIZED=bool(spec.quantization),
        IMPORT=into_cache,
        HEADS=power_of_two(spec.kv_heads),
        BLOCK=power_of_two(elements + bool(spec.quantization)),
    )
    if cache.values.is_cuda:
        torch.cuda.current_stream(cache.values.device).synchronize()
