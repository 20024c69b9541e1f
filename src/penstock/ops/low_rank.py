"""What an adapter adds to a matrix: two small ones (LoRA; Hu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """To outputs from ``first`` on, ``scale * up @ down @ x`` is added."""

    down: Tensor
    """``[rank, in]``, in the dtype that the model computes with."""
    up: Tensor
    """``[outputs, rank]``, likewise."""
    first: int
    scale: float
