"""Mixture of experts: the products of several experts in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.checkpoint.experts_config import Routing
from penstock.core import Code, PenstockError

from .elementwise import COLUMNS, power_of_two
from .kernels import experts as kernels
from .launch import launch
from .matrix import ExpertAssignments, Matrix, product, tile_of


@dataclass(frozen=True)
class Experts:
    """Stacked matrices of experts, of one shape and format."""

    matrix: Matrix
    """Matrix of the first expert; its tensors are ``[experts, ...]``."""
    first: int
    """Id of the first expert."""
    count: int
    """Number of experts."""
    weight_size: int
    """Number of elements of an expert's values."""
    scales_size: int
    """Number of elements of an expert's scales; 0 without scales."""


def stack_experts(matrices: Sequence[Matrix], first: int = 0) -> Experts:
    """See ``reference.stack_experts``. Raises ``PenstockError``: ``internal`` for different shapes or formats,
    ``unsupported`` for permuted inputs (act-order)."""
    if len({(m.outputs, m.inputs, m.dtype, m.format) for m in matrices}) != 1:
        shapes = {(m.outputs, m.inputs, str(m.format)) for m in matrices}
        raise PenstockError(Code.INTERNAL, f"the experts of a layer differ in shape or format: {sorted(shapes)}")
    if any("order" in matrix.tensors for matrix in matrices):
        message = "experts quantized by GPTQ with desc_act (permuted inputs) are not supported on GPUs: use a CPU"
        raise PenstockError(Code.UNSUPPORTED, message, "quantization")
    tensors = {name: torch.stack([matrix.tensors[name] for matrix in matrices]) for name in matrices[0].tensors}
    sizes = {name: tensor[0].numel() for name, tensor in tensors.items()}
    biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
    stacked = replace(
        matrices[0],
        tensors={name: tensor.flatten(0, 1) for name, tensor in tensors.items()},
        bias=torch.cat(biases) if biases else None,
    )
    return Experts(stacked, first, len(matrices), sizes["values"], sizes.get("scales", 0))


def select_experts(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.select_experts``."""
    assert table is None or table.is_contiguous()
    tokens, experts = logits.shape
    ids = logits.new_empty((tokens, routing.top_k), dtype=torch.int64)
    weights = logits.new_empty((tokens, routing.top_k))
    launch(
        kernels.route,
        (tokens,),
        logits,
        bias,
        factors,
        token_ids,
        table,
        ids,
        weights,
        experts,
        routing.scale,
        routing.min_sum,
        routing.added_sum,
        TOP_K=routing.top_k,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        SCORES=routing.scores,
        SUM_TOP2=routing.group_score == "two best",
        RENORMALIZE=routing.renormalize,
        SIZE=power_of_two(experts),
        TOP_K_SIZE=power_of_two(routing.top_k),
        num_warps=1 if experts <= 128 else 4,
    )
    return ids, weights


def experts_linear(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``reference.experts_linear``."""
    return _products(x, experts, ids, out)


def experts_activation_and_mul(
    x: Tensor, experts: Experts, ids: Tensor, function: str, out: Tensor | None = None
) -> Tensor:
    """See ``reference.experts_activation_and_mul``."""
    return _products(x, experts, ids, out, function)


def _products(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None, gated: str = "") -> Tensor:
    """Products of tokens with their experts; ``gated`` is the activation of gated products, else empty."""
    matrix, (tokens, top_k) = experts.matrix, ids.shape
    size = matrix.outputs // 2 if gated else matrix.outputs
    out = x.new_empty((tokens, top_k, size)) if out is None else out
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    assignments_per_row = top_k if x.dim() == 2 else 1
    product(rows, matrix, out.flatten(0, 1), gated, _group_assignments(rows, experts, ids, assignments_per_row))
    return out


def _group_assignments(x: Tensor, experts: Experts, ids: Tensor, assignments_per_row: int) -> ExpertAssignments:
    """Group the assignments of tokens to experts by expert, in tiles. The number of tiles is an upper bound, since no
    launch may depend on the selected experts."""
    matrix, count = experts.matrix, ids.numel()
    busy = min(experts.count, count)
    tile = tile_of(x, -(-count // experts.count), matrix.outputs * max(busy, 1), matrix.format)
    tiles = count // tile.bt + busy
    memory = torch.full((tiles * (tile.bt + 1),), -1, dtype=torch.int32, device=x.device)
    assignments, tile_experts = memory[: tiles * tile.bt], memory[tiles * tile.bt :]
    size = power_of_two(experts.count)
    launch(
        kernels.group_assignments,
        (experts.count,),
        ids,
        assignments,
        tile_experts,
        experts.first,
        experts.count,
        count,
        BT=tile.bt,
        SIZE=size,
        BLOCK=min(max(8192 // size, 16), 128),
    )
    return ExpertAssignments(
        assignments, tile_experts, assignments_per_row, tile, experts.weight_size, experts.scales_size
    )


def combine_experts(
    x: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See ``reference.combine_experts``."""
    tokens, top_k, size = x.shape
    out = x.new_empty((tokens, size)) if out is None else out
    launch(
        kernels.combine,
        (tokens, -(-size // COLUMNS)),
        x,
        weights,
        shared,
        gate,
        out,
        size,
        0 if shared is None else shared.stride(0),
        out.stride(0),
        TOP_K=top_k,
        BLOCK=COLUMNS,
    )
    return out
