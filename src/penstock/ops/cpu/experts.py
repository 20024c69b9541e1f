"""Mixture of experts: the products of all tokens with their experts in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.experts_config import Routing
from penstock.core import Code, PenstockError

from .. import _kernels
from .dtypes import DTYPE_CODES
from .elementwise import ACTIVATION_CODES, activation_and_mul, row_stride
from .graph import contiguous, empty
from .matrix import Matrix, unpermuted_input, without_activation_groups


@dataclass(frozen=True)
class Experts:
    """See ``reference.Experts``."""

    matrices: Sequence[Matrix]
    """Matrix of each expert, which owns the memory for ``native``."""
    native: Any
    """``_kernels.Experts``."""


def stack_experts(matrices: Sequence[Matrix], first: int = 0) -> Experts:
    """See ``reference.stack_experts``. Raises ``PenstockError`` (``internal``) for matrices of different shapes or
    formats."""
    if len({m.format.activation_groups for m in matrices}) > 1:  # matrices with permuted inputs have no groups
        matrices = [without_activation_groups(matrix) for matrix in matrices]
    if len({(m.outputs, m.inputs, m.dtype, m.format) for m in matrices}) != 1:
        shapes = {(m.outputs, m.inputs, str(m.format)) for m in matrices}
        raise PenstockError(Code.INTERNAL, f"the experts of a layer differ in shape or format: {sorted(shapes)}")
    native = _kernels.Experts(first)
    for matrix in matrices:
        native.add(matrix.native)
    return Experts(matrices, native)


SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
"""Numbers of ``Routing.scores`` in the kernels."""


def select_experts(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.select_experts``."""
    tokens, experts = logits.shape
    ids = empty((tokens, routing.top_k), torch.int64)
    weights = empty((tokens, routing.top_k), torch.float32)
    _kernels.route(
        logits.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if factors is None else factors.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        tokens,
        experts,
        routing.top_k,
        routing.groups,
        routing.top_groups,
        routing.scale,
        routing.min_sum,
        routing.added_sum,
        SCORES[routing.scores],
        routing.group_score == "two best",
        routing.renormalize,
        0 if token_ids is None else token_ids.data_ptr(),
        0 if table is None else table.data_ptr(),
    )
    return ids, weights


def count_experts(ids: Tensor, counts: Tensor, num_tokens: Tensor | None = None) -> None:
    """See ``reference.count_experts``. Batches have no padding on CPUs, so all tokens are counted."""
    _kernels.count_experts(ids.data_ptr(), counts.data_ptr(), len(ids), ids.shape[1])


def place_experts(ids: Tensor, places: Tensor) -> Tensor:
    """See ``reference.place_experts``."""
    out = empty(ids.shape, torch.int64)
    _kernels.place_experts(ids.data_ptr(), places.data_ptr(), out.data_ptr(), len(ids), ids.shape[1], places.shape[1])
    return out


def experts_linear(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``reference.experts_linear``."""
    out = empty((*ids.shape, experts.matrices[0].outputs), x.dtype) if out is None else out
    return _products(_kernels.experts_linear, x, experts, ids, out)


def experts_activation_and_mul(
    x: Tensor, experts: Experts, ids: Tensor, function: str, out: Tensor | None = None
) -> Tensor:
    """See ``reference.experts_activation_and_mul``. Calls a single kernel if each half has a multiple of 64 outputs."""
    size = experts.matrices[0].outputs // 2
    if size % _kernels.PANEL:
        return activation_and_mul(experts_linear(x, experts, ids), function, out)
    out = empty((*ids.shape, size), x.dtype) if out is None else out
    return _products(_kernels.experts_activation_and_mul, x, experts, ids, out, function)


def _products(kernel: Any, x: Tensor, experts: Experts, ids: Tensor, out: Tensor, function: str = "silu") -> Tensor:
    """Call a kernel of expert products. ``function`` is the activation of gated products, else ignored."""
    ids, top_k = contiguous(ids), ids.shape[1]
    _tensors, addresses = unpermuted_input(contiguous(x), experts.matrices[0])
    kernel(
        *addresses,
        experts.native,
        ids.data_ptr(),
        top_k,
        top_k if x.dim() == 2 else 1,
        out.data_ptr(),
        row_stride(out),
        x.shape[0],
        DTYPE_CODES[x.dtype],
        ACTIVATION_CODES[function],
    )
    return out


def combine_experts(
    x: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See ``reference.combine_experts``."""
    tokens, top_k, size = x.shape
    out = empty((tokens, size), x.dtype) if out is None else out
    _kernels.combine(
        x.data_ptr(),
        weights.data_ptr(),
        0 if shared is None else shared.data_ptr(),
        0 if gate is None else gate.data_ptr(),
        out.data_ptr(),
        tokens,
        top_k,
        size,
        0 if shared is None else shared.stride(0),
        out.stride(0),
        DTYPE_CODES[x.dtype],
    )
    return out
