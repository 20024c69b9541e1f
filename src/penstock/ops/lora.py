"""The weights that a LoRA adapter adds to one matrix (Hu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoRAWeights:
    """Adds ``scaling * b @ a @ x`` to a layer's outputs from ``offset`` on."""

    a: Tensor
    """``[rank, in]``, in the model's dtype."""
    b: Tensor
    """``[outputs, rank]``, in the model's dtype."""
    offset: int
    """First of the layer's outputs that ``b`` adds to."""
    scaling: float
