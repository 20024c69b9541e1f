"""AWQ (Lin et al., 2023): inputs with large activations are scaled up before rounding; group ranges are clipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.quantization import Format
from penstock.ops import Ops, QuantizedWeight

from .fold import Producer
from .rounding import round_between, to_groups
from .statistics import InputStatistics
from .threads import map_in_threads

GRID = 20
"""Number of candidate exponents of the activations' magnitude, evenly spaced in [0, 1)."""
CLIP_GRID = [1 - step / 20 for step in range(11)]
"""Candidate factors that shrink the range of a group."""
MIN_MAGNITUDE = 1e-4
"""Lower clamp of the mean magnitude of an input."""


def search_scales(
    ops: Ops, weights: Sequence[Tensor], statistics: InputStatistics, producer: Producer, format: Format, threads: int
) -> Tensor:
    """Return the scales ``[outputs of the producer]`` with the least squared error of rounding over sampled tokens.

    Args:
        weights: matrices with the same input, ``[out, in]`` float32 each.
    """
    weight = torch.cat(list(weights))
    samples = statistics.samples
    magnitude = producer.shrink(statistics.mean).clamp(min=MIN_MAGNITUDE)

    def rounding_error(step: int) -> tuple[Tensor, Tensor]:
        """The scales of a grid step, and the resulting error of each weight."""
        scales = magnitude ** (step / GRID)
        scales = scales / (scales.max() * scales.min()).sqrt()
        input_scales = producer.expand(scales)
        groups = to_groups(weight * input_scales, format)
        values, steps, offsets = round_between(groups, groups.amin(-1), groups.amax(-1), format.bits)
        rounded = (values * steps[..., None] + offsets[..., None]).flatten(1)
        return scales, (rounded / input_scales - weight).to(samples.dtype)

    best, lowest_loss = torch.ones_like(magnitude), float("inf")
    for scales, error in map_in_threads(rounding_error, range(GRID), threads):
        loss = squared_products(ops, samples, error)
        if loss < lowest_loss:
            best, lowest_loss = scales, loss
    return best


def squared_products(ops: Ops, samples: Tensor, weight: Tensor) -> float:
    """Return the sum of squares of the products of samples ``[tokens, in]`` and a weight ``[out, in]``."""
    products = ops.linear(samples, ops.pack([weight.to(samples.dtype)]), out_float32=True)
    return float(products.square().sum(dtype=torch.float64))


def round_clipped(weight: Tensor, statistics: InputStatistics, format: Format, clip: bool) -> QuantizedWeight:
    """Round ``[out, in]`` float32 with zero points.

    Args:
        clip: shrink the range of each group to the candidate with the least squared error of the products.
    """
    groups = to_groups(weight, format)
    lowest, highest = groups.amin(-1), groups.amax(-1)
    if clip:
        factor = _search_clipping(groups, statistics, format.bits)
        lowest, highest = lowest * factor, highest * factor
    values, scales, offsets = round_between(groups, lowest, highest, format.bits)
    return QuantizedWeight(values.flatten(1), scales, format, offsets)


def _search_clipping(groups: Tensor, statistics: InputStatistics, bits: int) -> Tensor:
    """Return the best factor of ``CLIP_GRID``, ``[out, groups]``, for groups ``[out, groups, group_size]``."""
    x = statistics.samples.float().unflatten(1, groups.shape[1:]).transpose(0, 1)
    products = x.transpose(1, 2) @ x  # [groups, group_size, group_size]
    lowest, highest = groups.amin(-1), groups.amax(-1)
    best = torch.ones_like(lowest)
    lowest_loss = torch.full_like(lowest, float("inf"))
    for factor in CLIP_GRID:
        values, scales, offsets = round_between(groups, lowest * factor, highest * factor, bits)
        error = (values * scales[..., None] + offsets[..., None] - groups).transpose(0, 1)
        loss = ((error @ products) * error).sum(-1).T
        best = torch.where(loss < lowest_loss, factor, best)
        lowest_loss = torch.minimum(lowest_loss, loss)
    return best
