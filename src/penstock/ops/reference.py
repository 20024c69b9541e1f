"""The definition of every op, in plain PyTorch. All backends are tested against it.

Ops compute in float32 and round their result to the input's dtype. They run on any device of PyTorch. None is
batch-invariant: PyTorch chooses the order of a sum by the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.quantization import MAX_FP8, UNQUANTIZED, Format
from penstock.planning.kv_spec import SCALE_BYTES, KVSpec, TransferLayout

from .activations import activation as activation
from .activations import activation_and_mul as activation_and_mul
from .batch import AttentionMetadata, Batch, ForwardFn, QKNorms
from .experts import combine_experts as combine_experts
from .experts import count_experts as count_experts
from .experts import place_experts as place_experts
from .experts import select_experts as select_experts
from .lora import LoRAWeights
from .quantized_weight import QuantizedWeight
from .sampling import sample_random as sample_random

NAME = "reference"
BATCH_INVARIANT = False
ASYNCHRONOUS = False
LAYOUT = "reference-1"
CPU = torch.device("cpu")
MIN_MAGNITUDE = 1e-30
"""Vectors whose largest magnitude is not above this are quantized to zeros."""


def fingerprint() -> str:
    """Backend and version of PyTorch. Results depend on shapes and threads, too, which no fingerprint can name."""
    return f"{NAME}-{torch.__version__}"


def set_threads(count: int) -> None:
    """Set the number of PyTorch's threads; 0 leaves PyTorch's default."""
    if count:
        torch.set_num_threads(count)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.empty``: memory for an op's ``out``, in a captured step, too."""
    return torch.empty(shape, dtype=dtype, device=device)


def supports(format: Format, dtype: torch.dtype) -> bool:
    """Whether ``pack_quantized`` takes weights of this format for products in this dtype."""
    return format.bits == 8 if format.floating else True


@dataclass(frozen=True)
class Matrix:
    """A matrix ``[out, in]``, dequantized where it was quantized, and a bias ``[out]`` or none."""

    weight: Tensor
    """In ``dtype``; float32 where the format quantizes."""
    bias: Tensor | None
    dtype: torch.dtype
    format: Format


KVCache = list[Tensor]
"""Keys and values of each layer: ``[vectors, blocks, block_size, kv_heads, head_dim]``, with ``KVSpec.vectors``.
A quantized cache is int8 or float8_e4m3fn, and its last dimension ends with the four bytes of the vector's float32
scale."""
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of quantized caches, by ``KVSpec.quantization``."""
CACHE_LIMITS = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""The largest number of a quantized vector."""


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Matrix:
    """Pack a matrix for this backend's products.

    Args:
        parts: matrices ``[rows, in]`` of one dtype, which are stacked to ``[out, in]``.
        bias: ``[out]``, added to each product.
        format: to quantize the weights to.
    """
    weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if not format.bits:
        return Matrix(weight, bias, weight.dtype, format)
    bias = None if bias is None else bias.float()
    return Matrix(_quantize_dequantize(weight.float(), format), bias, weight.dtype, format)


def pack_quantized(parts: Sequence[QuantizedWeight], dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """Pack quantized weights that a checkpoint has, as they are.

    Args:
        parts: of one format, which the backend ``supports``, and one order of inputs; they are stacked to
            ``[out, in]``.
        dtype: of products.
        bias: ``[out]``, added to each product.
    """
    weight = torch.cat([part.dequantize() for part in parts])
    return Matrix(weight, None if bias is None else bias.float(), dtype, parts[0].format)


def packed_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of a packed matrix without its bias, for ``from_packed``; empty where packing changes nothing."""
    return {"weight": matrix.weight} if matrix.format.bits else {}


def from_packed(
    tensors: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    """Make a matrix of ``packed_tensors``, which the same ``LAYOUT`` wrote."""
    return Matrix(tensors["weight"], None if bias is None else bias.float(), dtype, format)


def _quantize_dequantize(weight: Tensor, format: Format) -> Tensor:
    """Round to integers or 8-bit floating-point numbers, times scales; float32."""
    if format.floating:
        return _round_fp8(weight, format.rows_per_scale, format.group_size)
    groups = weight.split(format.group_size or weight.shape[1], 1)
    if len(groups) > 1:
        return torch.cat([_quantize_dequantize(group, replace(format, group_size=0)) for group in groups], 1)
    maximum = weight.abs().amax(1, keepdim=True)
    scale = maximum / 127
    if format.bits == 4:
        scale = torch.where((weight == maximum).any(1, keepdim=True), -maximum, maximum) / 8
    inverse = torch.where(maximum > MIN_MAGNITUDE, 1 / scale, 0)
    return (weight * inverse).round().clamp(max=7 if format.bits == 4 else 127) * scale


def _round_fp8(x: Tensor, rows: int = 1, columns: int = 0) -> Tensor:
    """Round to 8-bit floating-point numbers (e4m3) times a scale for each so many rows and columns, 0 being all."""
    (height, width), rows, columns = x.shape, rows or len(x), columns or x.shape[1]
    blocks = F.pad(x, (0, -width % columns, 0, -height % rows)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    maximum = blocks.abs().amax((1, 3), keepdim=True)
    scale = maximum / MAX_FP8
    inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, MAX_FP8) / maximum, 0)
    rounded: Tensor = (blocks * inverse).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(2).flatten(0, 1)[:height, :width]


def linear(x: Tensor, matrix: Matrix, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
    """``[tokens, in]`` to ``[tokens, out]``, in ``x``'s dtype or, with ``out_float32``, in float32.

    Where the format quantizes activations, each row is divided by its largest magnitude over 127 and rounded; or each
    row, or row and group, to 8-bit floating-point numbers.

    Args:
        out: where to write the result, which is returned; its rows are contiguous, and may lie apart. This holds for
            every op with an ``out``.
    """
    if not matrix.format.bits:
        product = F.linear(x, matrix.weight, matrix.bias)
        return _write(product.float() if out_float32 else product, out)
    given = x.float()
    if matrix.format.floating and not matrix.format.is_mxfp4:
        given = _round_fp8(given, columns=matrix.format.group_size)
    elif matrix.format.activation_bits:
        maximum = given.abs().amax(1, keepdim=True)
        inverse = torch.full_like(maximum, 127) / maximum  # a Python number over a tensor would be rounded twice
        given = (given * torch.where(maximum > MIN_MAGNITUDE, inverse, 0)).round() * (maximum / 127)
    product = F.linear(given, matrix.weight, matrix.bias)
    return _write(product if out_float32 else product.to(x.dtype), out)


def _write(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def linear_activation_and_mul(x: Tensor, matrix: Matrix, function: str, out: Tensor | None = None) -> Tensor:
    """``[tokens, in]`` to ``[tokens, out / 2]``: ``activation_and_mul`` of the product."""
    return activation_and_mul(linear(x, matrix), function, out)


@dataclass(frozen=True)
class Experts:
    """Matrices of one shape and format, those of a layer's experts from ``first`` on."""

    matrices: Sequence[Matrix]
    first: int


def stack_experts(matrices: Sequence[Matrix], first: int = 0) -> Experts:
    """Packed matrices of one shape and format, for products in which each token takes those of its own experts.

    Args:
        first: number of the first matrix's expert.
    """
    return Experts(matrices, first)


def experts_linear(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Products with each token's own experts: ``[tokens, top_k, out]``. Those of experts that are not among the
    matrices are left as they are in ``out``.

    Args:
        x: ``[tokens, in]``, or ``[tokens, top_k, in]``.
        ids: ``[tokens, top_k]`` int64, as ``select_experts`` gives them.
        out: as for ``linear``; those of a token may lie apart, too.
    """
    choices = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    if out is None:
        out = x.new_zeros((*ids.shape, len(experts.matrices[0].weight)))
    for number, matrix in enumerate(experts.matrices, experts.first):
        if (chosen := ids == number).any():
            out[chosen] = linear(choices[chosen], matrix)
    return out


def experts_activation_and_mul(
    x: Tensor, experts: Experts, ids: Tensor, function: str, out: Tensor | None = None
) -> Tensor:
    """As ``experts_linear``, of each product ``activation_and_mul``."""
    product = experts_linear(x, experts, ids)
    gated = activation_and_mul(product, function)
    if out is None:
        return gated
    own = (ids >= experts.first) & (ids < experts.first + len(experts.matrices))
    out[own] = gated[own]
    return out


LoRASlots = list[Sequence[LoRAWeights]]
"""A layer's adapters by slot; an empty sequence is an empty slot."""


def new_lora_slots(
    slots: int, inputs: int, outputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoRASlots:
    """Empty slots for a layer's adapters.

    Args:
        inputs, outputs: of the layer.
        max_rank: the sum of the ranks of an adapter's parts for this layer is not larger.
        dtype, device: of adapters.
    """
    return [()] * slots


def pack_lora(parts: Sequence[LoRAWeights]) -> Sequence[LoRAWeights]:
    """Pack one adapter's weights for a layer. Parts must add to different outputs."""
    return tuple(parts)


def set_lora(slots: LoRASlots, slot: int, packed: Sequence[LoRAWeights] | None) -> None:
    """Put packed weights into a slot, or empty it (None). No running step may use the slot."""
    slots[slot] = packed or ()


def add_lora(out: Tensor, x: Tensor, slots: LoRASlots, row_slots: Tensor) -> Tensor:
    """Add each row's adapter to a layer's output; returns ``[tokens, out]``.

    Products with ``a`` are rounded to ``x``'s dtype. A backend may change ``out`` in place.

    Args:
        out: ``[tokens, out]``, the layer's output.
        x: ``[tokens, in]``, the layer's input.
        row_slots: ``[tokens]`` int32, the slot of each row's adapter, -1 for none.
    """
    wide = out.float()
    for slot in row_slots.unique().tolist():
        rows = row_slots == slot
        for part in slots[slot] if slot >= 0 else ():
            ranks = F.linear(x[rows], part.a)
            added = F.linear(ranks.float(), part.b.float()) * part.scaling
            wide[rows, part.offset : part.offset + len(part.b)] += added
    return wide.to(out.dtype)


def argmax(x: Tensor, matrix: Matrix, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Index of the largest output of ``linear``, the lowest of equal ones, and that output: ``[tokens, in]`` to
    ``[tokens]`` int64 and ``[tokens]`` float32.

    Args:
        bitmask: ``[tokens, ceil(outputs / 32)]`` int32, a bit for each output that may be chosen, the lowest bit
            first. Where none is set for a token, the output is minus infinity.
    """
    logits = linear(x, matrix, out_float32=True)
    largest, index = (logits if bitmask is None else apply_bitmask(logits, bitmask)).max(-1)
    return index, largest


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Set logits ``[rows, outputs]`` to minus infinity, in place, where the bit in ``[rows, ceil(outputs / 32)]`` int32
    is not set. Returns them."""
    packed = bitmask.numpy(force=True).view(np.uint8)
    is_allowed = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
    return logits.masked_fill_(torch.from_numpy(is_allowed == 0).to(logits.device), float("-inf"))


def log_softmax(logits: Tensor) -> Tensor:
    """Log probabilities of logits ``[rows, outputs]`` float32."""
    return logits.log_softmax(-1)


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row of ``[rows, outputs]``, and their indices (int64), largest first."""
    found = values.topk(k, -1)
    return found.values, found.indices


def embedding(token_ids: Tensor, matrix: Matrix, first: int = 0, out: Tensor | None = None) -> Tensor:
    """Rows ``token_ids`` (``[tokens]`` int64) of a matrix ``[vocabulary, hidden]``: ``[tokens, hidden]``.

    Args:
        first: token id of the matrix's first row. Rows of ``out`` whose token id is of none of its rows are not
            written.
    """
    if out is None:
        return matrix.weight[token_ids - first].to(matrix.dtype)
    own = (token_ids >= first) & (token_ids < first + len(matrix.weight))
    out[own] = matrix.weight[token_ids[own] - first].to(matrix.dtype)
    return out


def index_select(x: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[rows]`` int64 of ``[tokens, ...]``.

    After its first ``index_select``, a captured step must compute with that number of rows only.
    """
    return x[rows]


def clone(x: Tensor) -> Tensor:
    """A copy of ``[tokens, size]``."""
    return x.clone()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension.

    Args:
        weight: ``[size]``. In ``x``'s dtype it multiplies what was rounded to that dtype, as in Llama; in float32 the
            result is rounded only once, as in Gemma.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream; returns the sum normed, and the sum, both ``[tokens, hidden]``.

    A backend may change ``residual`` in place.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al., 2016) over the last dimension, rounded once.

    Args:
        x: ``[tokens, size]`` or ``[tokens, heads, size]``; tokens may lie apart.
        weight: ``[size]`` float32, or ``[heads, size]``.
        bias: ``[size]`` float32, or none.
    """
    centered = x.float() - x.float().mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def scale(x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
    """``[rows, size]`` times a factor; with a cap ``cap * tanh(x / cap)`` of that (soft cap; Bello et al., 2016)."""
    wide = x.float() * factor
    return (cap * torch.tanh(wide / cap) if cap else wide).to(x.dtype)


def to_float32(x: Tensor) -> Tensor:
    """``[rows, size]`` in float32."""
    return x.float()


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Add ``x`` to the residual stream; returns the sum, ``[tokens, hidden]``, as ``add_rms_norm`` has it.

    A backend may change ``residual`` in place.
    """
    return residual + x


def rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding (Su et al., 2021) that rotates the two halves of a head against each other (NeoX style), or,
    interleaved, neighbours (GPT-J style).

    Args:
        x: ``[tokens, heads, head_dim]``; tokens may lie apart.
        positions: ``[tokens]`` int64.
        table: ``[max_len, rotary_dim]`` float32, cosines then sines (``layers.rope``): the first ``rotary_dim`` numbers
            of a head are rotated. It may be 0, which rotates nothing.
    """
    cos, sin = table[positions][:, None].chunk(2, -1)
    rotary = table.shape[1]
    wide, passed = x[..., :rotary].float(), x[..., rotary:]
    low, high = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = low * cos - high * sin, high * cos + low * sin
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((rotated.to(x.dtype), passed), -1)


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
        _store(part, given, slot_mapping)


def _store(part: Tensor, vectors: Tensor, slot_mapping: Tensor) -> None:
    if part.dtype in CACHE_LIMITS:
        part.view(torch.int8)[slot_mapping] = _quantize(vectors, part.dtype)
    else:
        part[slot_mapping] = vectors.to(part.dtype)


def _quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The last dimension quantized, and the four bytes of its float32 scale; all viewed as int8."""
    maximum, limit = x.float().abs().amax(-1, keepdim=True), CACHE_LIMITS[dtype]
    inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, limit) / maximum, 0)
    scaled = x.float() * inverse
    numbers = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return torch.cat((numbers.view(torch.int8), (maximum / limit).view(torch.int8)), -1)


def _dequantize(part: Tensor) -> Tensor:
    """The vectors of a part of a cache, float32."""
    if part.dtype not in CACHE_LIMITS:
        return part.float()
    numbers, scales = part.view(torch.int8).split([part.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    wide: Tensor = numbers.contiguous().view(part.dtype).float() * scales.contiguous().view(torch.float32)
    return wide


def attention(
    q: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
    chunked: bool = False,
) -> Tensor:
    """Attention of every query over its own sequence's cached keys and values; ``[tokens, heads * head_dim]``.

    Over a quantized cache, a backend may quantize queries and softmax weights to 8 bits, too.

    Args:
        q: ``[tokens, heads, head_dim]``; ``heads`` is a multiple of the cache's.
        scale: of the products of queries and keys.
        window: positions that a query sees, its own included; 0 is all.
        softcap: scaled products become ``softcap * tanh(product / softcap)``; 0 leaves them.
        sinks: ``[heads]`` float32, a logit of each head that takes part in the softmax and has no value; or none.
        causal: False lets a query see the positions after its own, too: all, or with a window as many as before it.
        chunked: positions are in chunks of ``window``, and a query sees its own chunk alone; with ``causal``.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[3]
    out = q.new_empty(q.shape[0], heads * dim) if out is None else out
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        blocks = metadata.block_tables[i, : -(-length // cache.shape[2])].long()
        k, v = (_dequantize(part[blocks].flatten(0, 1)[:length]) for part in cache)
        own = q[rows].float().view(-1, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("tkgd,skd->kgts", own, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length, device=q.device)
        position = at[length - len(own) :, None]
        hidden = at > (position if causal else position + window - 1 if window else length)
        if metadata.key_ends is not None:
            hidden = at >= metadata.key_ends[rows, None]
        if window:
            hidden |= at < position // window * window if chunked else at <= position - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :length]
        out[rows] = torch.einsum("kgts,skd->tkgd", weights, v).flatten(1).to(q.dtype)
    return out


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
    return _write(torch.einsum("thi,hoi->tho", x.float(), matrices.float()).to(x.dtype), out)


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
    _store(cache.flatten(1, 2)[0], vectors, slot_mapping)


def latent_attention(q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, latent: int) -> Tensor:
    """Causal attention of all heads over a latent cache: each token's vector is the key of all heads, and its first
    ``latent`` numbers are their value (DeepSeek-AI, 2024). Returns ``[tokens, heads, latent]``.

    Args:
        q: ``[tokens, heads, head_dim]``.
        metadata, scale: as for ``attention``.
    """
    whole = attention(q, cache.expand(2, *cache.shape[1:]), metadata, scale)
    return whole.view(q.shape)[..., :latent]


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


def capture(
    forward: ForwardFn,
    max_tokens: int,
    max_sequences: int,
    max_blocks: int,
    use_lora: bool = False,
    hidden_states: Tensor | None = None,
    *,
    device: torch.device = CPU,
    graph_sizes: Sequence[int] = (),
    sampled: Tensor | None = None,
    key_ends: bool = False,
) -> ForwardFn:
    """The forward pass in the form that this backend runs fastest: over batches in host memory. Its result is on the
    device, and valid until the next call.

    Args:
        forward: makes the same calls of ops for every batch, and nothing else.
        max_tokens, max_sequences: of a batch.
        max_blocks: of a sequence.
        use_lora: whether its batches have ``lora_slots``.
        hidden_states: ``[max_tokens, hidden]``, for batches that have ``hidden_states``: memory for them.
        device: that ``forward`` computes on.
        graph_sizes: numbers of sequences to capture CUDA graphs for.
        sampled: int64 on the device: the tokens that the step before has sampled, to which token ids of a batch may
            refer where the backend is ``ASYNCHRONOUS``.
        key_ends: whether its batches have ``AttentionMetadata.key_ends``; on CPUs only.
    """
    if device.type == "cpu":
        return forward

    def run(batch: Batch) -> Tensor:
        moved = batch.to(device)
        out = forward(moved)
        batch.aux_hidden_states = moved.aux_hidden_states
        return out

    return run
