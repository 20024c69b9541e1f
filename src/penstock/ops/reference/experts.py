"""Products with the experts that each token chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..activations import activation_and_mul
from .matrix import Matrix, linear


@dataclass(frozen=True)
class Experts:
    """Matrices of one shape and format, those of a layer's experts from ``first`` on."""

    matrices: Sequence[Matrix]
    first: int


def stack_experts(matrices: Sequence[Matrix], first: int = 0) -> Experts:
    """Packed matrices of one shape and format, for products in which each token takes those of its own experts.

    Args:
        first: number of the first matrix's expert.
    """
    return Experts(matrices, first)


def experts_linear(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Products with each token's own experts: ``[tokens, top_k, out]``. Those of experts that are not among the
    matrices are left as they are in ``out``.

    Args:
        x: ``[tokens, in]``, or ``[tokens, top_k, in]``.
        ids: ``[tokens, top_k]`` int64, as ``select_experts`` gives them.
        out: as for ``linear``; those of a token may lie apart, too.
    """
    choices = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    if out is None:
        out = x.new_zeros((*ids.shape, len(experts.matrices[0].weight)))
    for number, matrix in enumerate(experts.matrices, experts.first):
        if (chosen := ids == number).any():
            out[chosen] = linear(choices[chosen], matrix)
    return out


def experts_activation_and_mul(
    x: Tensor, experts: Experts, ids: Tensor, function: str, out: Tensor | None = None
) -> Tensor:
    """As ``experts_linear``, of each product ``activation_and_mul``."""
    product = experts_linear(x, experts, ids)
    gated = activation_and_mul(product, function)
    if out is None:
        return gated
    own = (ids >= experts.first) & (ids < experts.first + len(experts.matrices))
    out[own] = gated[own]
    return out
