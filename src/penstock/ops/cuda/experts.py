"""Mixture of experts: products with the matrices of several experts in one launch."""

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
from .matrix import Choices, Matrix, product, tile_of


@dataclass(frozen=True)
class Experts:
    """Matrices of one shape and format, which lie behind each other."""

    matrix: Matrix
    """The first one, whose tensors are ``[experts, ...]``."""
    first: int
    count: int
    weight_size: int
    scales_size: int


def stack_experts(matrices: Sequence[Matrix], first: int = 0) -> Experts:
    """As ``reference.stack_experts``. Raises ``PenstockError``: ``internal`` for matrices that differ in shape or
    format, ``unsupported`` for those whose inputs are in an order of their own."""
    kinds = {(each.outputs, each.inputs, each.dtype, each.format) for each in matrices}
    if len(kinds) != 1:
        raise PenstockError(Code.INTERNAL, "experts of a layer differ in shape or format")
    if any("order" in each.tensors for each in matrices):
        message = "experts that GPTQ has quantized with desc_act, of which each has inputs in another order, on GPUs"
        raise PenstockError(Code.UNSUPPORTED, message, "quantization")
    one = matrices[0]
    tensors = {name: torch.stack([each.tensors[name] for each in matrices]) for name in one.tensors}
    sizes = {name: tensor[0].numel() for name, tensor in tensors.items()}
    biases = [each.bias for each in matrices if each.bias is not None]
    stacked = replace(
        one,
        tensors={name: tensor.flatten(0, 1) for name, tensor in tensors.items()},
        bias=torch.cat(biases) if biases else None,
    )
    return Experts(stacked, first, len(matrices), sizes["values"], sizes.get("scales", 0))


def select_experts(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As ``reference.select_experts``."""
    tokens, experts = logits.shape
    ids = logits.new_empty((tokens, routing.top_k), dtype=torch.int64)
    weights = logits.new_empty((tokens, routing.top_k))
    launch(
        kernels.route,
        (tokens,),
        logits,
        bias,
        ids,
        weights,
        experts,
        routing.scale,
        routing.min_sum,
        TOP_K=routing.top_k,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        SIGMOID=routing.scores == "sigmoid",
        TWO_BEST=routing.group_score == "two best",
        RENORMALIZE=routing.renormalize,
        SIZE=power_of_two(experts),
        CHOICES=power_of_two(routing.top_k),
        num_warps=1 if experts <= 128 else 4,
    )
    return ids, weights


def experts_linear(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """As ``reference.experts_linear``."""
    return _products(x, experts, ids, out)


def experts_activation_and_mul(
    x: Tensor, experts: Experts, ids: Tensor, function: str, out: Tensor | None = None
) -> Tensor:
    """As ``reference.experts_activation_and_mul``."""
    return _products(x, experts, ids, out, function)


def _products(x: Tensor, experts: Experts, ids: Tensor, out: Tensor | None, gated: str = "") -> Tensor:
    matrix, (tokens, top_k) = experts.matrix, ids.shape
    size = matrix.outputs // 2 if gated else matrix.outputs
    out = x.new_empty((tokens, top_k, size)) if out is None else out
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    per_row = top_k if x.dim() == 2 else 1
    product(rows, matrix, out.flatten(0, 1), gated, _group(rows, experts, ids, per_row))
    return out


def _group(x: Tensor, experts: Experts, ids: Tensor, per_row: int) -> Choices:
    """Tiles of the choices of each expert: as many as there may be, since no launch may depend on what was chosen."""
    matrix, count = experts.matrix, ids.numel()
    busy = min(experts.count, count)
    tile = tile_of(x, -(-count // experts.count), matrix.outputs * max(busy, 1), matrix.format)
    tiles = count // tile.bt + busy
    places = torch.full((tiles * (tile.bt + 1),), -1, dtype=torch.int32, device=x.device)
    choices, owners = places[: tiles * tile.bt], places[tiles * tile.bt :]
    size = power_of_two(experts.count)
    launch(
        kernels.group_choices,
        (experts.count,),
        ids,
        choices,
        owners,
        experts.first,
        experts.count,
        count,
        BT=tile.bt,
        SIZE=size,
        BLOCK=min(max(8192 // size, 16), 128),
    )
    return Choices(choices, owners, per_row, tile, experts.weight_size, experts.scales_size)


def combine_experts(
    x: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """As ``reference.combine_experts``."""
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
