"""GPTQ (Frantar et al., 2022): inputs are rounded one by one; the remaining inputs compensate for each error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.quantization import Format
from penstock.ops import QuantizedWeight
from penstock.ops.hadamard import hadamard

from .options import ActOrder
from .rounding import integer_range, rotate, search_weighted_scales, to_half

DAMPING = 0.01
"""Fraction of the mean of the Hessian's diagonal that is added to the diagonal."""
COLUMNS = 128
"""Inputs per block. Errors are applied to the block after each input, and to all later inputs after the block."""


@dataclass(frozen=True)
class Factor:
    """Factorized Hessian, shared by matrices with the same input. Inputs are permuted by ``order``."""

    hessian: Tensor
    """``[in, in]`` float32, damped."""
    upper: Tensor
    """``[in, in]`` float32, upper triangular: the Cholesky factor of the inverse Hessian."""
    order: Tensor
    """``[in]`` int64: indices of the inputs in rounding order."""
    is_used: Tensor
    """``[in]`` bool: False for inputs that were always zero."""


def factorize(hessian: Tensor, act_order: ActOrder, group_size: int) -> Factor:
    """Prepare a Hessian ``[in, in]`` float32.

    Args:
        act_order: order of rounding: inputs by descending activations ("group"), groups and then the inputs in each
            group by descending activations ("static"), or unpermuted ("none").
        group_size: inputs of a group; 0: all inputs.
    """
    order = _rounding_order(hessian.diagonal(), act_order, group_size or len(hessian))
    permuted = hessian[order][:, order].double()
    is_used = permuted.diagonal() > 0
    permuted.diagonal()[~is_used] = 1.0
    damping = DAMPING * float(permuted.diagonal().mean())
    while True:
        damped = permuted + torch.eye(len(permuted), dtype=permuted.dtype) * damping
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return Factor(damped.float(), upper.float(), order, is_used)
        damping *= 10


def _rounding_order(square_sums: Tensor, act_order: ActOrder, group_size: int) -> Tensor:
    """Return the order of rounding, ``[in]``, for the sum of squares of each input's activations, ``[in]``."""
    if act_order == "none":
        return torch.arange(len(square_sums))
    order = square_sums.argsort(descending=True, stable=True)
    if act_order == "group":
        return order
    group_sums = square_sums.view(-1, group_size).sum(1)
    rank = torch.empty_like(order[: len(group_sums)])
    rank[group_sums.argsort(descending=True, stable=True)] = torch.arange(len(group_sums))
    return order[rank[order // group_size].argsort(stable=True)]


def rotated_hessian(hessian: Tensor, format: Format) -> Tensor:
    """Return the Hessian ``[in, in]`` of the inputs after the rotation of the format."""
    block = format.rotation_block(len(hessian))
    return hadamard(hadamard(hessian, block).T.contiguous(), block)


def round_compensating(weight: Tensor, factor: Factor, format: Format, act_order: ActOrder) -> QuantizedWeight:
    """Round ``[out, in]`` float32 symmetrically, with float16 scales.

    Args:
        factor: factorized Hessian (``rotated_hessian`` if the format rotates), computed with the same ``act_order``
            and, for 4 bits, the same group size.
    """
    weight = torch.where(factor.is_used, rotate(weight, format)[:, factor.order], 0.0).T.contiguous()
    group_size = format.group_size or len(weight)
    values, scales = _round_in_order(weight.clone(), factor.upper, group_size, format.bits)
    if format.bits == 4:
        _descend(weight, values, scales, factor.hessian, group_size)
    rows, scales = values.to(torch.int8).T.contiguous(), scales.T.contiguous()
    if act_order == "group":
        return QuantizedWeight(rows, scales, format, order=factor.order)
    natural = torch.empty_like(rows).index_copy_(1, factor.order, rows)
    groups = factor.order[::group_size] // group_size
    return QuantizedWeight(natural, torch.empty_like(scales).index_copy_(1, groups, scales), format)


def _round_in_order(weight: Tensor, upper: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Round all inputs in order. Returns the integers ``[in, out]`` float32, and the scales ``[groups, out]``.

    Args:
        weight: ``[in, out]`` float32; the tensor is overwritten.
        upper: Cholesky factor of the inverse Hessian (``Factor.upper``).
    """
    limits, importance = integer_range(bits), upper.diagonal() ** -2
    values, scales = torch.empty_like(weight), []
    for start in range(0, len(weight), group_size):
        stop = start + group_size
        scale = to_half(search_weighted_scales(weight[start:stop].T, importance[start:stop], bits))
        scales.append(scale)
        for first in range(start, stop, COLUMNS):
            end = min(first + COLUMNS, stop)
            block, factor = weight[first:end], upper[first:end, first:end]
            errors = torch.empty_like(block)
            for row in range(end - first):
                rounded = torch.div(block[row], scale, out=values[first + row]).round_().clamp_(*limits)
                error = torch.addcmul(block[row], rounded, scale, value=-1, out=errors[row]).div_(factor[row, row])
                block[row + 1 :].addr_(factor[row, row + 1 :], error, alpha=-1)
            weight[end:].addmm_(upper[first:end, end:].T, errors, alpha=-1)
    return values, torch.stack(scales)


def _descend(weight: Tensor, values: Tensor, scales: Tensor, hessian: Tensor, group_size: int) -> None:
    """Run one pass of coordinate descent over scales and integers, which minimizes the squared error of the products.

    Args:
        weight: ``[in, out]`` float32.
        values, scales: 4-bit result of ``_round_in_order``, overwritten.
    """
    limits = integer_range(4)
    gradient = hessian @ (weight - values * scales.repeat_interleave(group_size, 0))
    for group, start in enumerate(range(0, len(weight), group_size)):
        rows = slice(start, start + group_size)
        block, integers, scale = hessian[rows, rows], values[rows], scales[group]
        before, residual = integers * scale, gradient[rows].clone()
        squares = (integers * (block @ integers)).sum(0)
        better = scale + torch.where(squares > 0, (integers * residual).sum(0) / squares, 0.0)
        scale.copy_(to_half(better))
        residual.addmm_(block, integers * scale - before, alpha=-1)
        for row in range(group_size):
            step = integers[row] + residual[row] / (scale * block[row, row])
            change = step.round_().clamp_(*limits) - integers[row]
            integers[row] += change
            residual.addr_(block[row], change.mul_(scale), alpha=-1)
        gradient.addmm_(hessian[:, rows], integers * scale - before, alpha=-1)
