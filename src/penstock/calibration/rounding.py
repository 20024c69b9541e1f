"""Rounding of weights to integers or 8-bit floating-point numbers with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.quantization import MAX_FP8, Format
from penstock.ops import QuantizedWeight
from penstock.ops.hadamard import hadamard
from penstock.ops.scale_search import search_scales

MIN_MAGNITUDE = 1e-30
"""Groups whose largest magnitude is not above this become zeros, as in ``ops.reference``."""

CLIPPING = [1 + step / 24 for step in range(12)]
"""Clipping factors: the largest magnitude is tried at ``-8 * factor``; integers below -8 are clipped."""


def rotate(weight: Tensor, format: Format) -> Tensor:
    """``[out, in]`` float32 as the format rotates it, for inputs that ``hadamard`` rotates."""
    block = format.rotation_block(weight.shape[1])
    return hadamard(weight, block) / block


def round_to_nearest(weight: Tensor, format: Format) -> QuantizedWeight:
    """``[out, in]`` float32 rounded as the ops do it when a model is loaded (``ops.reference.pack``)."""
    if format.floating:
        maximum = weight.abs().amax(1, keepdim=True)
        inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, MAX_FP8) / maximum, 0)
        values = (weight * inverse).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
        return QuantizedWeight(values, maximum / MAX_FP8, format)
    groups = to_groups(rotate(weight, format), format)
    scales = symmetric_scales(groups, format.bits)
    return QuantizedWeight(round_symmetric(groups, scales, format.bits).flatten(1), scales, format)


def to_groups(weight: Tensor, format: Format) -> Tensor:
    """``[out, in]`` as ``[out, groups, group_size]``."""
    groups: Tensor = weight.unflatten(1, (-1, format.group_size or weight.shape[1]))
    return groups


def symmetric_scales(groups: Tensor, bits: int) -> Tensor:
    """The scales ``[...]`` of groups ``[..., group_size]``: the largest magnitude becomes 127; of 4 bits they are
    searched (``ops.scale_search``)."""
    maximum = groups.abs().amax(-1)
    if bits == 8:
        return maximum / 127
    return torch.where(maximum > MIN_MAGNITUDE, search_scales(groups), maximum * 0)


def search_weighted_scales(groups: Tensor, importance: Tensor, bits: int) -> Tensor:
    """As ``symmetric_scales``, but of 4 bits the error of each input counts as much as ``importance`` ``[group_size]``
    says, and more scales are tried."""
    maximum = groups.abs().amax(-1)
    if bits == 8:
        return maximum / 127
    lowest, highest = integer_range(bits)
    base = torch.where((groups == maximum[..., None]).any(-1), -maximum, maximum) / 8
    values = groups / torch.where(base != 0, base, 1.0)[..., None]
    best, ratio = torch.zeros_like(base), torch.zeros_like(base)
    for clipping in CLIPPING:
        rounded = (values * clipping).round().clamp(lowest, highest)
        product, square = (rounded * values) @ importance, (rounded * rounded) @ importance
        gain = torch.where(square > 0, product * product / square, 0.0)
        is_better = gain > best
        best, ratio = torch.where(is_better, gain, best), torch.where(is_better, product / square, ratio)
    return base * ratio


def round_symmetric(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Groups ``[..., group_size]`` as int8, for scales ``[...]``."""
    inverse = torch.where(scales.abs() * 2 ** (bits - 1) > MIN_MAGNITUDE, 1 / scales, 0)[..., None]
    return (groups * inverse).round().clamp(*integer_range(bits)).to(torch.int8)


def integer_range(bits: int) -> tuple[int, int]:
    """The least and the largest integer of symmetric formats."""
    return (-8, 7) if bits == 4 else (-127, 127)


def round_between(groups: Tensor, lowest: Tensor, highest: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups with a zero point, as AWQ's checkpoints have them: scales in float16, zero points in the integers'
    range.

    Args:
        groups: ``[..., group_size]`` float32.
        lowest, highest: ``[...]`` of each group; what lies outside is clipped.

    Returns:
        Values ``[..., group_size]`` int8, from ``-2 ** (bits - 1)`` on; scales ``[...]``; offsets ``[...]``.
    """
    levels, middle = 2**bits - 1, 2 ** (bits - 1)
    scales = to_half((highest.clamp(min=0) - lowest.clamp(max=0)) / levels)
    zeros = (-lowest.clamp(max=0) / scales).round().clamp(0, levels)
    values = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, levels)
    return (values - middle).to(torch.int8), scales, (middle - zeros) * scales


def to_half(scales: Tensor) -> Tensor:
    """Scales rounded to float16, in which checkpoints have them; 1 where nothing is left."""
    rounded = scales.half().float()
    return torch.where(rounded != 0, rounded, 1.0)
