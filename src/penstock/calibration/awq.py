"""AWQ (Lin et al., 2023): inputs with large activations are scaled up before rounding, and groups are clipped."""

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
"""Exponents of the activations' magnitude that are tried, from 0 to below 1."""
CLIP_GRID = [1 - step / 20 for step in range(11)]
"""Shares of a group's range that are tried."""
MIN_MAGNITUDE = 1e-4
"""Of an input's mean, below which it is taken for this."""


def search_scales(
    ops: Ops, weights: Sequence[Tensor], statistics: InputStatistics, producer: Producer, format: Format, threads: int
) -> Tensor:
    """The scales ``[outputs of the producer]`` for which rounding of matrices of one input changes their products
    least, in squares summed over the sampled tokens.

    Args:
        weights: ``[out, in]`` float32 each.
    """
    weight = torch.cat(list(weights))
    samples = statistics.samples
    magnitude = producer.shrink(statistics.mean).clamp(min=MIN_MAGNITUDE)

    def change(step: int) -> tuple[Tensor, Tensor]:
        """The scales of a step, and what rounding changes then."""
        scales = magnitude ** (step / GRID)
        scales = scales / (scales.max() * scales.min()).sqrt()
        wide = producer.expand(scales)
        groups = to_groups(weight * wide, format)
        values, steps, offsets = round_between(groups, groups.amin(-1), groups.amax(-1), format.bits)
        rounded = (values * steps[..., None] + offsets[..., None]).flatten(1)
        return scales, (rounded / wide - weight).to(samples.dtype)

    best, least = torch.ones_like(magnitude), float("inf")
    for scales, changed in map_in_threads(change, range(GRID), threads):
        loss = squared_products(ops, samples, changed)
        if loss < least:
            best, least = scales, loss
    return best


def squared_products(ops: Ops, samples: Tensor, weight: Tensor) -> float:
    """The sum of the squares of samples ``[tokens, in]`` times ``[out, in]``."""
    products = ops.linear(samples, ops.pack([weight.to(samples.dtype)]), out_float32=True)
    return float(products.square().sum(dtype=torch.float64))


def round_clipped(weight: Tensor, statistics: InputStatistics, format: Format, clip: bool) -> QuantizedWeight:
    """Round ``[out, in]`` float32 with zero points, the range of each group shrunk to what changes its products least.

    Args:
        clip: whether to shrink ranges at all.
    """
    groups = to_groups(weight, format)
    lowest, highest = groups.amin(-1), groups.amax(-1)
    if clip:
        share = _search_clipping(groups, statistics, format.bits)
        lowest, highest = lowest * share, highest * share
    values, scales, offsets = round_between(groups, lowest, highest, format.bits)
    return QuantizedWeight(values.flatten(1), scales, format, offsets)


def _search_clipping(groups: Tensor, statistics: InputStatistics, bits: int) -> Tensor:
    """The best share of the range of groups ``[out, groups, group_size]``: ``[out, groups]``."""
    x = statistics.samples.float().unflatten(1, groups.shape[1:]).transpose(0, 1)
    products = x.transpose(1, 2) @ x  # [groups, group_size, group_size]
    lowest, highest = groups.amin(-1), groups.amax(-1)
    best = torch.ones_like(lowest)
    least = torch.full_like(lowest, float("inf"))
    for share in CLIP_GRID:
        values, scales, offsets = round_between(groups, lowest * share, highest * share, bits)
        change = (values * scales[..., None] + offsets[..., None] - groups).transpose(0, 1)
        loss = ((change @ products) * change).sum(-1).T
        best = torch.where(loss < least, share, best)
        least = torch.minimum(least, loss)
    return best
