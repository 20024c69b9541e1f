"""LoRA weights of one matrix (Hu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoRAWeights:
    """LoRA weights, which add ``scaling * b @ a @ x`` to a layer's outputs from output ``offset`` on."""

    a: Tensor
    """``[rank, in]``, in the model's dtype."""
    b: Tensor
    """``[outputs, rank]``, in the model's dtype."""
    offset: int
    """First output of the layer to which the product is added."""
    scaling: float
    """Factor of the product, such as ``lora_alpha / r``."""
