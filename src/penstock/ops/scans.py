"""Weights of the selective scan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ScanWeights:
    """Weights of ``selective_scan`` on one rank, all float32."""

    rates: Tensor
    """``[state_size, channels]``: logarithm of a state's decay per unit of the step (A, transposed)."""
    step_bias: Tensor
    """``[channels]``: bias of the steps (dt)."""
    skip: Tensor
    """``[channels]``: factor of the input that is added to the output (D)."""
