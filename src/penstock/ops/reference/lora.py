"""LoRA adapters of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lora import LoRAWeights

LoRASlots = list[Sequence[LoRAWeights]]
"""Parts of the adapter in each slot of a layer; empty for an empty slot."""


def new_lora_slots(
    slots: int, inputs: int, outputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoRASlots:
    """Create empty slots for the adapters of a layer.

    Args:
        inputs, outputs: sizes of the layer.
        max_rank: maximum sum of the ranks of an adapter's parts for this layer.
        dtype, device: dtype and device of adapters.
    """
    return [()] * slots


def pack_lora(parts: Sequence[LoRAWeights]) -> Sequence[LoRAWeights]:
    """Pack an adapter's weights for a layer. The parts must have disjoint outputs."""
    return tuple(parts)


def set_lora(slots: LoRASlots, slot: int, packed: Sequence[LoRAWeights] | None) -> None:
    """Load packed weights into a slot, or empty it (None). No running step may use the slot."""
    slots[slot] = packed or ()


def add_lora(out: Tensor, x: Tensor, slots: LoRASlots, row_slots: Tensor) -> Tensor:
    """Add the product with each row's adapter to a layer's output; returns ``[tokens, out]``.

    Products with ``LoRAWeights.a`` are rounded to ``x``'s dtype. A backend may change ``out`` in place.

    Args:
        out: ``[tokens, out]``, the layer's output.
        x: ``[tokens, in]``, the layer's input.
        row_slots: ``[tokens]`` int32, the slot of each row's adapter; -1: no adapter.
    """
    total = out.float()
    for slot in row_slots.unique().tolist():
        rows = row_slots == slot
        for part in slots[slot] if slot >= 0 else ():
            ranks = F.linear(x[rows], part.a)
            added = F.linear(ranks.float(), part.b.float()) * part.scaling
            total[rows, part.offset : part.offset + len(part.b)] += added
    return total.to(out.dtype)
