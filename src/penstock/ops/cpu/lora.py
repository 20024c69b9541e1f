"""LoRA products: rows with the same adapter are multiplied together, even if they are not adjacent in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _kernels
from ..lora import LoRAWeights
from .graph import contiguous
from .matrix import Matrix, pack


@dataclass(frozen=True)
class PackedLoRA:
    """Weights of an adapter for one layer."""

    a: Matrix
    """Stacked ``LoRAWeights.a`` of all parts."""
    b: tuple[Matrix, ...]
    """``LoRAWeights.b`` of each part."""
    parts: tuple[tuple[int, float], ...]
    """Offset and scaling of each part."""


@dataclass(frozen=True)
class LoRASlots:
    """Adapters of a layer by slot."""

    native: Any
    """``_kernels.Adapters``."""
    packed: dict[int, PackedLoRA]
    """Adapter in each used slot, which owns the memory for ``native``."""


def new_lora_slots(
    slots: int, inputs: int, outputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> LoRASlots:
    """See ``reference.new_lora_slots``."""
    return LoRASlots(_kernels.Adapters(slots), {})


def pack_lora(parts: Sequence[LoRAWeights]) -> PackedLoRA:
    """See ``reference.pack_lora``."""
    a = pack([torch.cat([part.a for part in parts])])
    return PackedLoRA(a, tuple(pack([part.b]) for part in parts), tuple((part.offset, part.scaling) for part in parts))


def set_lora(slots: LoRASlots, slot: int, packed: PackedLoRA | None) -> None:
    """See ``reference.set_lora``."""
    slots.native.clear(slot)
    slots.packed.pop(slot, None)
    if packed is not None:
        slots.packed[slot] = packed
        slots.native.put(slot, packed.a.native)
        for b, (offset, scaling) in zip(packed.b, packed.parts, strict=True):
            slots.native.add(slot, b.native, offset, scaling)


def add_lora(out: Tensor, x: Tensor, slots: LoRASlots, row_slots: Tensor) -> Tensor:
    """See ``reference.add_lora``. ``out`` is changed in place."""
    x = contiguous(x)
    _kernels.add_lora(x.data_ptr(), out.data_ptr(), slots.native, row_slots.data_ptr(), len(out), out.stride(0))
    return out
