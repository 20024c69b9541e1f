"""SmoothQuant (Xiao et al., 2022): inputs with large activations are scaled down, and their weights up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .statistics import InputStatistics

MIN_MAGNITUDE = 1e-5
"""Of an input or its weights, below which it is taken for this."""


def smoothing_scales(weights: Sequence[Tensor], statistics: InputStatistics, strength: float) -> Tensor:
    """The scales ``[in]`` that inputs are divided by, and their weights multiplied with.

    Args:
        weights: of matrices that share the input, ``[out, in]`` float32 each.
        strength: alpha in the paper.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=MIN_MAGNITUDE)
    scales = statistics.maximum.clamp(min=MIN_MAGNITUDE) ** strength / largest ** (1 - strength)
    return scales.clamp(min=MIN_MAGNITUDE)
