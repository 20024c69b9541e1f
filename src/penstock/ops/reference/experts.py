"""Products with the selected experts of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..activations import activation_and_mul
from .matrix import Matrix, linear


@dataclass(frozen=True)
class Experts:
    """Matrices of experts, of one shape and format."""

    matrices: Sequence[Matrix]
    first: int
    """Expert id of the first matrix."""


def stack_experts(matrices: Sequence[Matrix], first: int = 0) -> Experts:
    """Stack packed matrices of one shape and format for ``experts_linear``.

    Args:
        first: expert id of the first matrix.
    """
    return Experts(matrices, first)


def experts_linear(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply each token by the matrices of its experts; returns ``[tokens, top_k, out]``. Entries of ``out`` for
    experts without a matrix are not written.

    Args:
        x: ``[tokens, in]``, or ``[tokens, top_k, in]``.
        ids: ``[tokens, top_k]`` int64, from ``select_experts``.
        out: memory for the result (see ``linear``); the entries of a token may also be strided.
    """
    inputs = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    if out is None:
        out = x.new_zeros((*ids.shape, len(experts.matrices[0].weight)))
    for expert, matrix in enumerate(experts.matrices, experts.first):
        if (selected := ids == expert).any():
            out[selected] = linear(inputs[selected], matrix)
    return out


def experts_activation_and_mul(
    x: Tensor, experts: Experts, ids: Tensor, function: str, out: Tensor | None = None
) -> Tensor:
    """``experts_linear``, followed by ``activation_and_mul``."""
    product = experts_linear(x, experts, ids)
    gated = activation_and_mul(product, function)
    if out is None:
        return gated
    is_local = (ids >= experts.first) & (ids < experts.first + len(experts.matrices))
    out[is_local] = gated[is_local]
    return out
