"""Rounding of weights to integers or 8-bit floating-point numbers with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.quantization import MAX_FP8, Format
from penstock.ops import QuantizedWeight
from penstock.ops.hadamard import hadamard
from penstock.ops.scale_search import search_scales

MIN_MAGNITUDE = 1e-30
"""Groups whose largest magnitude is at most this are rounded to zeros, as in ``ops.reference``."""

CLIPPING = [1 + step / 24 for step in range(12)]
"""Candidate clipping factors: the largest magnitude is mapped to ``-8 * factor``; integers below -8 are clipped."""


def rotate(weight: Tensor, format: Format) -> Tensor:
    """Rotate ``[out, in]`` float32 by the format's Hadamard blocks, for inputs that are rotated by ``hadamard``."""
    block = format.rotation_block(weight.shape[1])
    return hadamard(weight, block) / block


def round_to_nearest(weight: Tensor, format: Format) -> QuantizedWeight:
    """Round ``[out, in]`` float32 to nearest, as quantization at load does (``ops.reference.pack``)."""
    if format.floating:
        maximum = weight.abs().amax(1, keepdim=True)
        inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, MAX_FP8) / maximum, 0)
        values = (weight * inverse).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
        return QuantizedWeight(values, maximum / MAX_FP8, format)
    groups = to_groups(rotate(weight, format), format)
    scales = symmetric_scales(groups, format.bits)
    return QuantizedWeight(round_symmetric(groups, scales, format.bits).flatten(1), scales, format)


def to_groups(weight: Tensor, format: Format) -> Tensor:
    """View ``[out, in]`` as ``[out, groups, group_size]``."""
    groups: Tensor = weight.unflatten(1, (-1, format.group_size or weight.shape[1]))
    return groups


def symmetric_scales(groups: Tensor, bits: int) -> Tensor:
    """Return the scales ``[...]`` of groups ``[..., group_size]``: the largest magnitude over 127 with 8 bits, the
    result of ``search_scales`` with 4 bits."""
    maximum = groups.abs().amax(-1)
    if bits == 8:
        return maximum / 127
    return torch.where(maximum > MIN_MAGNITUDE, search_scales(groups), maximum * 0)


def search_weighted_scales(groups: Tensor, importance: Tensor, bits: int) -> Tensor:
    """Same as ``symmetric_scales``, except that with 4 bits the squared error of each input is weighted by
    ``importance`` ``[group_size]``, and more scales are tried."""
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
    """Round groups ``[..., group_size]`` to int8 with scales ``[...]``."""
    inverse = torch.where(scales.abs() * 2 ** (bits - 1) > MIN_MAGNITUDE, 1 / scales, 0)[..., None]
    return (groups * inverse).round().clamp(*integer_range(bits)).to(torch.int8)


def integer_range(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest integer of symmetric formats."""
    return (-8, 7) if bits == 4 else (-127, 127)


def round_between(groups: Tensor, lowest: Tensor, highest: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups with a zero point as in AWQ checkpoints: float16 scales, zero points in the range of the integers.

    Args:
        groups: ``[..., group_size]`` float32.
        lowest, highest: range of each group, ``[...]``; values outside are clipped.

    Returns:
        Values ``[..., group_size]`` int8, signed integers of ``bits`` bits; scales ``[...]``; offsets ``[...]``.
    """
    levels, middle = 2**bits - 1, 2 ** (bits - 1)
    scales = to_half((highest.clamp(min=0) - lowest.clamp(max=0)) / levels)
    zeros = (-lowest.clamp(max=0) / scales).round().clamp(0, levels)
    values = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, levels)
    return (values - middle).to(torch.int8), scales, (middle - zeros) * scales


def to_half(scales: Tensor) -> Tensor:
    """Round scales to float16, their dtype in checkpoints. Scales that become 0 are replaced by 1."""
    rounded = scales.half().float()
    return torch.where(rounded != 0, rounded, 1.0)
