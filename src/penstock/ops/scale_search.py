"""Scales of weights that Penstock rounds to 4 bits, in plain PyTorch: the definition that kernels follow to the bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CANDIDATES = 6
"""Scales that are tried for a group."""
MAX_INTEGER = 15
"""Largest integer scale of a group."""
MIN_MAGNITUDE = 1e-30
"""Groups whose largest magnitude is not above this become zeros."""
LANES = 16
"""Sums are kept in so many lanes, which are added in a tree, as the kernels' vectors are."""


def search_scales(groups: Tensor) -> Tensor:
    """The scales ``[...]`` of least squared error for groups ``[..., size]`` float32, among ``CANDIDATES``.

    With the first candidate the largest magnitude becomes -8; the k-th is smaller by ``1 + k / 16`` and clips what is
    larger. Each candidate's integers are then given the scale that fits them best, ``sum(q * w) / sum(q * q)``, and the
    candidate with the least error wins. (llama.cpp's ``make_qx_quants`` searches this way, too.) Scales have the
    precision of float16, 11 significant bits, and any exponent.
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
    """Integer scales of groups ``[..., groups, size]`` float32, and the scale of all groups that they multiply.

    The scale of all groups is a fifteenth of the largest that ``search_scales`` finds. Of the two integers next to a
    group's scale, the one with less squared error is taken.

    Returns:
        Integers from -15 to 15 as float32, ``[..., groups]``, 0 for a group of zeros; and scales ``[...]`` float32,
        which are not finite where some weight is not.
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
    """Squared errors ``[...]`` of groups ``[..., size]`` that are rounded with scales, less the squares of weights."""
    values = groups * (1 / scales)[..., None]
    rounded = values.round().clamp(-8, 7)
    return (_sum(rounded * rounded) - 2 * _sum(rounded * values)) * (scales * scales)


def round_scales(scales: Tensor) -> Tensor:
    """Float32 rounded to 11 significant bits, to even in the middle; what is no number stays none."""
    bits = scales.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales)


def fits_half(scales: Tensor) -> bool:
    """Whether float16 has all scales exactly, as zero or in its normal range."""
    half = scales.half()
    normal = (half.abs() >= torch.finfo(half.dtype).tiny) | (half == 0)
    return bool(((half.float() == scales) & normal).all())


def _sum(x: Tensor) -> Tensor:
    """Sums over the last dimension, in the kernels' order."""
    lanes = torch.zeros(*x.shape[:-1], LANES, device=x.device)
    for part in pad(x, (0, -x.shape[-1] % LANES)).split(LANES, -1):
        lanes = lanes + part
    while (width := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]
