"""LoRA adapters of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.ops import LoRAWeights, Ops
from penstock.parallel import Shard


class LoRALayer:
    """One layer's part of each loaded adapter, by the adapter's slot.

    Args:
        slots: as of ``Ops.new_lora_slots``, made by the same backend.
        parts: layers that share ``slots``, where each adapter has a slot for each of them.
        part: number of this one.
    """

    def __init__(self, ops: Ops, slots: Any, parts: int = 1, part: int = 0) -> None:
        self._ops = ops
        self._slots = slots
        self._parts, self._part = parts, part

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
        self._ops.set_lora(self._slots, slot * self._parts + self._part, packed)


class ExpertLoRA:
    """The adapters of one projection of all experts of a layer.

    Args:
        slots: as of ``LoRALayer``, for ``num_experts`` layers.
    """

    def __init__(self, ops: Ops, slots: Any, num_experts: int) -> None:
        self._num_experts = num_experts
        self.experts = [LoRALayer(ops, slots, num_experts, number) for number in range(num_experts)]

    def __call__(self, out: Tensor, x: Tensor, row_slots: Tensor, ids: Tensor) -> Tensor:
        """Add each row's adapter to the products with its experts, in place. Captured steps cannot do that.

        Args:
            out: ``[tokens, top_k, out]``.
            x: ``[tokens, in]``, or ``[tokens, top_k, in]``.
            row_slots: as of ``LoRALayer``.
            ids: ``[tokens, top_k]``, each token's experts.
        """
        own = torch.where(row_slots[:, None] < 0, -1, row_slots[:, None] * self._num_experts + ids)
        for choice, slots in enumerate(own.T.to(torch.int32).contiguous()):
            products = out[:, choice]
            products.copy_(self.experts[0](products, x if x.dim() == 2 else x[:, choice], slots))
        return out


@dataclass(frozen=True)
class LoRATarget:
    """A matrix of the checkpoint that adapters may add to."""

    layer: LoRALayer
    inputs: int
    shard: Shard
    """The rank's outputs of the matrix."""
    offset: int
    """Index of the first of them among the layer's outputs."""
