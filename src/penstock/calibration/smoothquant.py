"""SmoothQuant (Xiao et al., 2022): inputs with large activations are scaled down, and their weights scaled up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .statistics import InputStatistics

MIN_MAGNITUDE = 1e-5
"""Lower clamp of the largest magnitude of an input, and of its weights."""


def smoothing_scales(weights: Sequence[Tensor], statistics: InputStatistics, strength: float) -> Tensor:
    """Return the scales ``[in]``: inputs are divided by them, and weights multiplied.

    Args:
        weights: matrices that share the input, ``[out, in]`` float32 each.
        strength: alpha of the paper, from 0 to 1.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=MIN_MAGNITUDE)
    scales = statistics.maximum.clamp(min=MIN_MAGNITUDE) ** strength / largest ** (1 - strength)
    return scales.clamp(min=MIN_MAGNITUDE)
