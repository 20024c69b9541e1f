"""What each op computes, in plain PyTorch. This is the definition that every backend is tested against.

Ops compute in float32 and round to their input's dtype where they end. They run on any device PyTorch knows. None
is batch-invariant: PyTorch chooses the order of its sums by shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import KVSpec, Queries, Step
from .formats import PLAIN, Format
from .low_rank import LowRank

NAME = "reference"
BATCH_INVARIANT = False
LAYOUT = "reference-1"
NOTHING = 1e-30
"""The largest magnitude of what is rounded to zeros."""


def fingerprint() -> str:
    """What decides the bits of a result besides the model, as far as it can be said."""
    return f"reference-{torch.__version__}"


def set_threads(count: int) -> None:
    """Threads that PyTorch uses; 0 leaves that to it."""
    if count:
        torch.set_num_threads(count)


@dataclass(frozen=True)
class Matrix:
    """``[out, in]`` as it multiplies, and a bias ``[out]`` or none."""

    weight: Tensor
    """In its own dtype; float32 where it was rounded."""
    bias: Tensor | None
    dtype: torch.dtype
    format: Format


Cache = list[Tensor]
"""A layer's keys and values each: ``[2, blocks, block_size, kv_heads, head_dim]``. Rounded ones are int8, and the four
bytes of a float32 scale follow."""


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = PLAIN) -> Matrix:
    """A matrix ``[out, in]``, given as some rows after others, with a bias ``[out]`` or none, rounded to a format."""
    weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if not format.bits:
        return Matrix(weight, bias, weight.dtype, format)
    bias = None if bias is None else bias.float()
    return Matrix(_rounded(weight.float(), format), bias, weight.dtype, format)


def packed(matrix: Matrix) -> dict[str, Tensor]:
    """What ``restore`` makes the same matrix of, but for its bias; nothing for one that is as in the checkpoint."""
    return {"weight": matrix.weight} if matrix.format.bits else {}


def restore(
    found: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    """A matrix from what ``packed`` gave, under the same ``LAYOUT``."""
    return Matrix(found["weight"], None if bias is None else bias.float(), dtype, format)


def _rounded(weight: Tensor, format: Format) -> Tensor:
    """Integers times scales, float32."""
    groups = weight.split(format.group or weight.shape[1], 1)
    if len(groups) > 1:
        return torch.cat([_rounded(group, replace(format, group=0)) for group in groups], 1)
    most = weight.abs().amax(1, keepdim=True)
    scale = most / 127
    if format.bits == 4:
        scale = torch.where((weight == most).any(1, keepdim=True), -most, most) / 8
    inverse = torch.where(most > NOTHING, 1 / scale, 0)
    return (weight * inverse).round().clamp(max=7 if format.bits == 4 else 127) * scale


def linear(x: Tensor, matrix: Matrix, wide: bool = False) -> Tensor:
    """``[tokens, in]`` to ``[tokens, out]``, in ``x``'s dtype, or float32 where ``wide``.

    Where the format rounds activations, each row is divided by its largest magnitude over 127 and rounded.
    """
    if not matrix.format.bits:
        out = F.linear(x, matrix.weight, matrix.bias)
        return out.float() if wide else out
    given = x.float()
    if matrix.format.activations:
        most = given.abs().amax(1, keepdim=True)
        inverse = torch.full_like(most, 127) / most  # a number divided by a tensor would be rounded twice
        given = (given * torch.where(most > NOTHING, inverse, 0)).round() * (most / 127)
    out = F.linear(given, matrix.weight, matrix.bias)
    return out if wide else out.to(x.dtype)


def gated(x: Tensor, matrix: Matrix) -> Tensor:
    """``[tokens, in]`` to ``[tokens, out / 2]``: SiLU of the first half of outputs by the other half (Shazeer,
    2020)."""
    return silu_mul(linear(x, matrix))


Adapters = list[Sequence[LowRank]]
"""By slot: what the adapter there adds to a layer, nothing where there is none."""


def new_adapters(slots: int) -> Adapters:
    """Room for what so many adapters add to a layer."""
    return [()] * slots


def pack_low_rank(parts: Sequence[LowRank]) -> Sequence[LowRank]:
    """What an adapter adds to a layer, as ``put_low_rank`` takes it: no output is in two of the parts."""
    return tuple(parts)


def put_low_rank(adapters: Adapters, slot: int, packed: Sequence[LowRank] | None) -> None:
    """Put it into a slot that no row of a step uses, or nothing."""
    adapters[slot] = packed or ()


def add_low_rank(out: Tensor, x: Tensor, adapters: Adapters, slots: Tensor) -> Tensor:
    """What a layer has made of ``[tokens, in]``, ``[tokens, out]``, with what each row's adapter adds to it.

    Numbers between the two matrices are rounded to ``x``'s dtype. A backend may write to ``out``.

    Args:
        slots: ``[tokens]`` int32; -1 is none.
    """
    wide = out.float()
    for slot in slots.unique().tolist():
        rows = slots == slot
        for part in adapters[slot] if slot >= 0 else ():
            ranks = F.linear(x[rows], part.down)
            added = F.linear(ranks.float(), part.up.float()) * part.scale
            wide[rows, part.first : part.first + len(part.up)] += added
    return wide.to(out.dtype)


def likeliest(x: Tensor, matrix: Matrix, allowed: Tensor | None = None) -> Tensor:
    """The output that is largest, the first where several are: ``[tokens, in]`` to ``[tokens]`` int64.

    Args:
        allowed: ``[tokens, outputs / 32]`` int32, a bit for each output that may be chosen, the lowest first; at least
            one a token.
    """
    scores = linear(x, matrix, wide=True)
    return (scores if allowed is None else only(scores, allowed)).argmax(-1)


def only(scores: Tensor, allowed: Tensor) -> Tensor:
    """``[rows, outputs]``, but minus infinity where a bit of ``[rows, outputs / 32]`` int32 is not set."""
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    bits = (allowed[:, :, None] >> places) & 1
    return scores.masked_fill(bits.flatten(1)[:, : scores.shape[1]] == 0, float("-inf"))


def embedding(token_ids: Tensor, matrix: Matrix) -> Tensor:
    """Rows ``[tokens]`` int64 of a matrix ``[vocabulary, hidden]``: ``[tokens, hidden]``."""
    return matrix.weight[token_ids].to(matrix.dtype)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[rows]`` int64 of ``[tokens, ...]``. What is computed of a step after it first takes some is computed of
    as many rows."""
    return x[rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x`` added to the residual stream: the sum normed, and the sum, both ``[tokens, hidden]``."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021), the two halves of a head against each other.

    Args:
        x: ``[tokens, heads, head_dim]``.
        positions: ``[tokens]`` int64.
        table: ``[longest, head_dim]`` float32, cosines then sines.
    """
    cos, sin = table[positions][:, None].chunk(2, -1)
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``[tokens, 2 * size]``, gate then up, to ``silu(gate) * up`` of ``[tokens, size]``."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def new_cache(spec: KVSpec, blocks: int, device: torch.device) -> Cache:
    """An empty cache: one entry a layer."""
    size, dtype = (spec.head_dim + 4, torch.int8) if spec.rounded else (spec.head_dim, spec.dtype)
    shape = (2, blocks, spec.block_size, spec.kv_heads, size)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]


def store(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write ``[tokens, kv_heads, head_dim]`` keys and values into a layer's cache.

    A rounded cache divides those of each token and head by their largest magnitude over 127, and rounds.
    """
    flat = cache.flatten(1, 2)
    for part, given in zip(flat, (k, v), strict=True):
        part[slots] = torch.cat(_integers(given), -1) if cache.dtype == torch.int8 else given.to(cache.dtype)


def _integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """The last dimension as int8, and its float32 scale as four of those."""
    most = x.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(most > NOTHING, torch.full_like(most, 127) / most, 0)
    return (x.float() * inverse).round().to(torch.int8), (most / 127).view(torch.int8)


def _kept(part: Tensor) -> Tensor:
    """What a part of a cache holds, float32."""
    if part.dtype != torch.int8:
        return part.float()
    return part[..., :-4].float() * part[..., -4:].contiguous().view(torch.float32)


def attention(q: Tensor, cache: Tensor, queries: Queries, scale: float, window: int = 0) -> Tensor:
    """Causal attention of every query over its own sequence's cached keys and values.

    Args:
        q: ``[tokens, heads, head_dim]`` of the tokens that ``queries`` names; ``heads`` is a multiple of the cache's.
        window: positions that a query sees, itself included; 0 is all.

    Returns:
        ``[tokens, heads, head_dim]``.

    Over a rounded cache a backend may round queries and weights to 8 bits, too.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[3]
    out = torch.empty_like(q)
    starts, lengths = queries.starts.tolist(), queries.lengths.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        blocks = queries.block_tables[i, : -(-length // cache.shape[2])].long()
        k, v = (_kept(part[blocks].flatten(0, 1)[:length]) for part in cache)
        own = q[rows].float().view(-1, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("tkgd,skd->kgts", own, k) * scale
        at = torch.arange(length, device=q.device)
        position = at[length - len(own) :, None]
        hidden = at > position
        if window:
            hidden |= at <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("kgts,skd->tkgd", weights, v).reshape(-1, heads, dim).to(q.dtype)
    return out


def copy_blocks(source: Cache, target: Cache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks of all layers, ``(from, to)`` each; the caches may be one, or on different devices."""
    if not pairs:
        return
    origins, goals = (list(blocks) for blocks in zip(*pairs, strict=True))
    for layer, other in zip(source, target, strict=True):
        other[:, goals] = layer[:, origins].to(other.device)


def recorded(step: Step, tokens: int, sequences: int, blocks: int, adapted: bool = False) -> Step:
    """A model's step as this backend runs it fastest. Its results hold until the next step.

    Args:
        step: makes ops only, always the same but for the batch.
        tokens, sequences, blocks: of a batch, the latter of one sequence, at most.
        adapted: whether its batches have tokens with adapters.
    """
    return step
