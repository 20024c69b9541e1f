"""GPTQ (Frantar et al., 2022): inputs are rounded one after the other, and those that follow make up for the error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.quantization import Format
from penstock.ops import QuantizedWeight
from penstock.ops.hadamard import hadamard

from .options import ActOrder
from .rounding import rotate, round_symmetric, symmetric_scales, to_groups, to_half

DAMPING = 0.01
"""Share of the Hessian's mean diagonal that is added to the diagonal."""
COLUMNS = 128
"""Inputs after which the error is passed on to all that follow; before that, to this many only."""


@dataclass(frozen=True)
class Factor:
    """What matrices of one input need of their Hessian."""

    upper: Tensor
    """``[in, in]`` float32, upper triangular: the Cholesky factor of the inverse Hessian, in the order of ``order``."""
    order: Tensor
    """``[in]`` int64: inputs in the order in which they are rounded."""
    is_used: Tensor
    """``[in]`` bool: whether an input, as they come, was ever other than zero."""


def factorize(hessian: Tensor, by_activation: bool) -> Factor:
    """Prepare a Hessian ``[in, in]`` float32.

    Args:
        by_activation: whether inputs with the largest activations are rounded first.
    """
    wide = hessian.double()
    diagonal = wide.diagonal()
    is_used = diagonal > 0
    order = diagonal.argsort(descending=True, stable=True) if by_activation else torch.arange(len(wide))
    wide = wide[order][:, order]
    wide.diagonal()[~is_used[order]] = 1.0
    damping = DAMPING * float(wide.diagonal().mean())
    while True:
        damped = wide + torch.eye(len(wide), dtype=wide.dtype) * damping
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return Factor(upper.float(), order, is_used)
        damping *= 10


def rotated_hessian(hessian: Tensor, format: Format) -> Tensor:
    """The Hessian ``[in, in]`` of inputs that the format rotates."""
    block = format.rotation_block(len(hessian))
    return hadamard(hadamard(hessian, block).T.contiguous(), block)


def round_compensating(weight: Tensor, factor: Factor, format: Format, act_order: ActOrder) -> QuantizedWeight:
    """Round ``[out, in]`` float32 symmetrically, with scales in float16.

    Args:
        factor: made by activation unless ``act_order`` is ``none``; of the rotated Hessian where the format rotates.
    """
    weight = rotate(weight, format)
    group_size = format.group_size or weight.shape[1]
    weight = torch.where(factor.is_used, weight, 0.0)
    scales = to_half(symmetric_scales(to_groups(weight, format), format.bits))
    group_of = factor.order // group_size
    weight = weight[:, factor.order]
    if act_order == "group":
        group_of = torch.arange(len(group_of)) // group_size
    values = torch.empty(weight.shape, dtype=torch.int8)
    for first in range(0, weight.shape[1], COLUMNS):
        end = min(first + COLUMNS, weight.shape[1])
        block, upper = weight[:, first:end].clone(), factor.upper[first:end, first:end]
        errors = torch.empty_like(block)
        for column in range(end - first):
            place = first + column
            if act_order != "static" and place % group_size == 0:  # of what the errors before have made of the group
                left = weight[:, place : place + group_size].clone()
                left[:, : end - place] = block[:, column : column + group_size]
                scales[:, place // group_size] = to_half(symmetric_scales(left, format.bits))
            scale = scales[:, group_of[place]]
            rounded = round_symmetric(block[:, column, None], scale, format.bits)
            values[:, place] = rounded[:, 0]
            error = (block[:, column] - rounded[:, 0] * scale) / upper[column, column]
            block[:, column:] -= error[:, None] * upper[column, column:]
            errors[:, column] = error
        weight[:, end:] -= errors @ factor.upper[first:end, end:]
    if act_order == "group":
        return QuantizedWeight(values, scales, format, order=factor.order)
    natural = torch.empty_like(values).index_copy_(1, factor.order, values)
    return QuantizedWeight(natural, scales, format)
