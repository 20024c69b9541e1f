"""LoRA products. Adapters are in buffers with fixed addresses, for CUDA graphs; kernels read the slot of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..lora import LoRAWeights
from .kernels import lora as kernels
from .launch import launch
from .matrix import DTYPES

TILE = 64
"""Number of outputs of a program."""
RANKS = 64
"""Ranks are padded to a multiple of this number."""
SPLIT = 1024
"""Number of inputs that a program sums, so that few tokens use more multiprocessors. The partial sums are added in
ascending order. This number does not depend on the number of tokens, so that the bits of a row do not either."""
SMALL_TILE_TOKENS = 256
"""Maximum number of tokens for small tiles, which give more programs."""


@dataclass(frozen=True)
class PackedLoRA:
    """Weights of an adapter for one layer."""

    a: Tensor
    """``[ranks, in]``: stacked ``LoRAWeights.a`` of all parts."""
    parts: tuple[LoRAWeights, ...]


@dataclass(frozen=True)
class LoRASlots:
    """Adapters of a layer by slot."""

    a: Tensor
    """``[slots, max_rank, in]``: ``PackedLoRA.a``."""
    b: Tensor
    """``[slots, out, max_rank]``: nonzero at the ranks of the part that adds to an output."""
    scalings: Tensor
    """``[slots, out]`` float32: scaling of each output."""
    ranks: Tensor
    """``[slots]`` int32: number of ranks of each adapter."""
    spans: Tensor
    """``[slots, tiles, 2]`` int32: first rank, and rank after the last, of each tile of outputs."""


def new_lora_slots(
    slots: int, inputs: int, outputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoRASlots:
    """See ``reference.new_lora_slots``."""
    padded = -(-max_rank // RANKS) * RANKS
    return LoRASlots(
        torch.zeros((slots, padded, inputs), dtype=dtype, device=device),
        torch.zeros((slots, outputs, padded), dtype=dtype, device=device),
        torch.zeros((slots, outputs), device=device),
        torch.zeros(slots, dtype=torch.int32, device=device),
        torch.zeros((slots, -(-outputs // TILE), 2), dtype=torch.int32, device=device),
    )


def pack_lora(parts: Sequence[LoRAWeights]) -> PackedLoRA:
    """See ``reference.pack_lora``."""
    return PackedLoRA(torch.cat([part.a for part in parts]), tuple(parts))


def set_lora(slots: LoRASlots, slot: int, packed: PackedLoRA | None) -> None:
    """See ``reference.set_lora``."""
    for buffer in (slots.a, slots.b, slots.scalings, slots.ranks, slots.spans):
        buffer[slot].zero_()
    if packed is None:
        return
    ranks, max_rank = len(packed.a), slots.a.shape[1]
    if ranks > max_rank:
        raise ValueError(f"the adapter has {ranks} ranks in total, but slots have at most {max_rank}")
    slots.a[slot, :ranks] = packed.a.to(slots.a)
    slots.ranks[slot] = ranks
    spans, first = [[max_rank, 0] for _ in range(slots.spans.shape[1])], 0
    for part in packed.parts:
        outputs, last = slice(part.offset, part.offset + len(part.b)), first + part.b.shape[1]
        slots.b[slot, outputs, first:last] = part.b.to(slots.b)
        slots.scalings[slot, outputs] = part.scaling
        for tile in range(outputs.start // TILE, -(-outputs.stop // TILE)):
            spans[tile] = [min(spans[tile][0], first), max(spans[tile][1], last)]
        first = last
    slots.spans[slot] = torch.tensor(spans, dtype=torch.int32, device=slots.spans.device)


def add_lora(out: Tensor, x: Tensor, slots: LoRASlots, row_slots: Tensor) -> Tensor:
    """See ``reference.add_lora``. ``out`` is changed in place."""
    (tokens, inputs), (count, outputs, max_rank) = x.shape, slots.b.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    bt, rows = (16, 16) if tokens <= SMALL_TILE_TOKENS else (64, 64)
    if x.dtype is torch.float32:
        bt = 16
    splits, token_tiles = -(-inputs // SPLIT), -(-tokens // bt)
    partial = x.new_empty((splits, tokens, max_rank), dtype=torch.float32)
    launch(
        kernels.shrink,
        (token_tiles, splits, count * max_rank // rows),
        x,
        row_slots,
        slots.a,
        slots.ranks,
        partial,
        tokens,
        inputs,
        max_rank,
        x.stride(0),
        SPLIT=SPLIT,
        ROWS=rows,
        BN=64,
        BT=bt,
        BK=64,
        num_stages=4,
    )
    launch(
        kernels.expand,
        (-(-outputs // TILE), token_tiles, count),
        partial,
        row_slots,
        slots.b,
        slots.scalings,
        slots.spans,
        out,
        tokens,
        outputs,
        max_rank,
        splits,
        out.stride(0),
        DTYPE=DTYPES[x.dtype],
        BN=TILE,
        BT=bt,
        BR=32,
    )
    return out
