"""Scale search for 4-bit weights, in plain PyTorch. The kernels give the same bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CANDIDATES = 6
"""Number of candidate scales of a group."""
MAX_INTEGER = 15
"""Largest integer scale of a group."""
MIN_MAGNITUDE = 1e-30
"""Groups up to this magnitude are quantized to zeros."""
LANES = 16
"""Number of partial sums, which are added in a tree, like the kernels do with their vectors."""


def search_scales(groups: Tensor) -> Tensor:
    """Return the scales ``[...]`` with the least squared error for groups ``[..., size]`` float32.

    Candidate 0 maps the largest magnitude to -8; candidate k is smaller by the factor ``1 + k / 16``, and clips larger
    weights. The integers q of a candidate then get their optimal scale, ``sum(q * w) / sum(q * q)``, and the candidate
    with the least error is chosen, like in llama.cpp's ``make_qx_quants``. Scales have the precision of float16 (11
    significant bits), and any exponent.
    """
    maximum = groups.abs().amax(-1)
    base = torch.where((groups == maximum[..., None]).any(-1), -maximum, maximum) / 8
    values = groups * (1 / base)[..., None]
    best, ratio = torch.zeros_like(base), torch.ones_like(base)
    for number in range(CANDIDATES):
        rounded = (values * (1 + number / 16)).round().clamp(-8, 7)
        product, square = _sum(rounded * values), _sum(rounded * rounded)
        gain = product * product / square
        is_better = gain > best
        best, ratio = torch.where(is_better, gain, best), torch.where(is_better, product / square, ratio)
    return round_scales(base * ratio)


def search_integer_scales(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Search two-level scales of groups ``[..., groups, size]`` float32: an integer per group, times a common scale.

    The common scale is the largest scale of ``search_scales`` divided by 15. A group's scale is rounded up or down to
    an integer, depending on which one has the lower squared error.

    Returns:
        Integers from -15 to 15 as float32, ``[..., groups]``, 0 for a group of zeros; and the common scales ``[...]``
        float32, which are not finite if a weight is not finite.
    """
    maximum = groups.abs().amax(-1)
    exact = torch.where(maximum > MIN_MAGNITUDE, search_scales(groups), maximum * 0)
    largest = exact.abs().amax(-1, keepdim=True)
    unit = largest / MAX_INTEGER
    sizes = exact.abs() * (torch.full_like(largest, MAX_INTEGER) / largest)
    signs = torch.where(exact < 0, -1.0, 1.0)
    low, high = (signs * (sizes.floor() + step).clamp(1, MAX_INTEGER) for step in (0, 1))
    is_higher = _rounding_error(groups, high * unit) < _rounding_error(groups, low * unit)
    integers = torch.where(is_higher, high, low)
    return torch.where((exact != 0) & unit.isfinite(), integers, 0.0), unit[..., 0]


def _rounding_error(groups: Tensor, scales: Tensor) -> Tensor:
    """Squared error ``[...]`` of rounding groups ``[..., size]`` with scales, minus the constant sum of squares."""
    values = groups * (1 / scales)[..., None]
    rounded = values.round().clamp(-8, 7)
    return (_sum(rounded * rounded) - 2 * _sum(rounded * values)) * (scales * scales)


def round_scales(scales: Tensor) -> Tensor:
    """Round float32 to 11 significant bits, half to even. Values that are not finite are unchanged."""
    bits = scales.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales)


def fits_half(scales: Tensor) -> bool:
    """True if all scales are exactly representable in float16, as zero or a normal number."""
    half = scales.half()
    normal = (half.abs() >= torch.finfo(half.dtype).tiny) | (half == 0)
    return bool(((half.float() == scales) & normal).all())


def _sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, in the order of the kernels."""
    lanes = torch.zeros(*x.shape[:-1], LANES, device=x.device)
    for chunk in pad(x, (0, -x.shape[-1] % LANES)).split(LANES, -1):
        lanes = lanes + chunk
    while (width := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]
