"""LoRA adapters of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.ops import LoRAWeights, Ops
from penstock.parallel import Shard


class LoRALayer:
    """LoRA weights of one layer, for all loaded adapters, by slot.

    Args:
        slots: result of ``Ops.new_lora_slots`` of the same backend.
        parts: number of layers that share ``slots``; each adapter has one slot per layer.
        part: index of this layer among the ``parts`` layers.
    """

    def __init__(self, ops: Ops, slots: Any, parts: int = 1, part: int = 0) -> None:
        self._ops = ops
        self._slots = slots
        self._parts, self._part = parts, part

    def __call__(self, out: Tensor, x: Tensor, row_slots: Tensor) -> Tensor:
        """Add the product with each row's adapter to the layer's output.

        Args:
            out: ``[tokens, out]``, the layer's output; may be modified in place.
            x: ``[tokens, in]``, the layer's input.
            row_slots: ``[tokens]`` int32: slot of each row; -1: no adapter.
        """
        return self._ops.add_lora(out, x, self._slots, row_slots)

    def share_slots(self, other: LoRALayer) -> None:
        """Share the slots, and the adapters in them, of the same layer of another model."""
        self._slots = other._slots

    def pack(self, parts: list[LoRAWeights]) -> Any:
        """Pack an adapter's weights for ``set``. May run in a separate thread while steps are computed."""
        return self._ops.pack_lora(parts)

    def set(self, slot: int, packed: Any | None) -> None:
        """Put packed weights into a slot that no running step uses, or empty it (None)."""
        self._ops.set_lora(self._slots, slot * self._parts + self._part, packed)


class ExpertLoRA:
    """LoRA weights of one projection of all experts in a layer.

    Args:
        slots: result of ``Ops.new_lora_slots``, with one slot per adapter and expert.
    """

    def __init__(self, ops: Ops, slots: Any, num_experts: int) -> None:
        self._num_experts = num_experts
        self.experts = [LoRALayer(ops, slots, num_experts, number) for number in range(num_experts)]

    def __call__(self, out: Tensor, x: Tensor, row_slots: Tensor, ids: Tensor) -> Tensor:
        """Add the product with each row's adapter to the outputs of its experts, in place. Not for CUDA graphs.

        Args:
            out: ``[tokens, top_k, out]``.
            x: ``[tokens, in]``, or ``[tokens, top_k, in]``.
            row_slots: ``[tokens]`` int32: slot of each row; -1: no adapter.
            ids: ``[tokens, top_k]``: experts of each token.
        """
        expert_slots = torch.where(row_slots[:, None] < 0, -1, row_slots[:, None] * self._num_experts + ids)
        for choice, slots in enumerate(expert_slots.T.to(torch.int32).contiguous()):
            products = out[:, choice]
            products.copy_(self.experts[0](products, x if x.dim() == 2 else x[:, choice], slots))
        return out


@dataclass(frozen=True)
class LoRATarget:
    """A matrix of the checkpoint that adapters may change."""

    layer: LoRALayer
    inputs: int
    shard: Shard
    """This rank's outputs of the matrix."""
    offset: int
    """Index of the first of these outputs in the layer's output."""
