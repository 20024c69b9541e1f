"""LoRA adapters of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.ops import LoRAWeights, Ops
from penstock.parallel import Shard


class LoRALayer:
    """One layer's part of each loaded adapter, by the adapter's slot.

    Args:
        slots: as of ``Ops.new_lora_slots``, made by the same backend.
    """

    def __init__(self, ops: Ops, slots: Any) -> None:
        self._ops = ops
        self._slots = slots

    def __call__(self, out: Tensor, x: Tensor, row_slots: Tensor) -> Tensor:
        """Add each row's adapter to the layer's output.

        Args:
            out: ``[tokens, out]``, the layer's output; may be changed in place.
            x: ``[tokens, in]``, the layer's input.
            row_slots: ``[tokens]`` int32, -1 for rows without an adapter.
        """
        return self._ops.add_lora(out, x, self._slots, row_slots)

    def share_slots(self, other: LoRALayer) -> None:
        """Use the slots of the same layer of another model, with the adapters in them."""
        self._slots = other._slots

    def pack(self, parts: list[LoRAWeights]) -> Any:
        """Pack an adapter's weights for ``set``; may run in another thread than steps do."""
        return self._ops.pack_lora(parts)

    def set(self, slot: int, packed: Any | None) -> None:
        """Put packed weights into a slot that no running step uses, or empty it (None)."""
        self._ops.set_lora(self._slots, slot, packed)


@dataclass(frozen=True)
class LoRATarget:
    """A matrix of the checkpoint that adapters may add to."""

    layer: LoRALayer
    inputs: int
    shard: Shard
    """The rank's outputs of the matrix."""
    offset: int
    """Index of the first of them among the layer's outputs."""
