"""Mixture of experts (Shazeer et al., 2017): how a router's logits choose experts, and how their outputs are added."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.experts_config import Routing


def select_experts(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, those with the best scores, and their weights: ``[tokens, top_k]`` int64 and float32,
    best first, and the lowest of equal ones.

    Args:
        logits: ``[tokens, experts]`` float32.
        bias: ``[experts]`` float32, added to the scores for the choice of groups and experts, but not for the weights.
    """
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.top_groups < routing.groups:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(1 if routing.group_score == "max" else 2).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(routing.top_groups).indices, 1).bool()
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=routing.min_sum)
    return ids, weights * routing.scale


def count_experts(ids: Tensor, counts: Tensor, num_tokens: Tensor | None = None) -> None:
    """Count how many tokens chose each expert.

    Args:
        ids: ``[tokens, top_k]`` int64, as of ``select_experts``.
        counts: ``[experts]`` int64, which are raised.
        num_tokens: ``[1]`` int32: tokens to count, from the first one on; None is all.
    """
    one = torch.ones_like(ids)
    if num_tokens is not None:
        one *= (torch.arange(len(ids), device=ids.device) < num_tokens)[:, None]
    counts.scatter_add_(0, ids.flatten(), one.flatten())


def place_experts(ids: Tensor, places: Tensor) -> Tensor:
    """The place of each token's experts, among those of all ranks: ``[tokens, top_k]`` int64. The replicas of an expert
    take turns by the tokens' numbers in the batch.

    Args:
        ids: ``[tokens, top_k]`` int64, as of ``select_experts``.
        places: ``[experts, 1 + most replicas]`` int64: the number of an expert's replicas, and their places.
    """
    own = places[ids]
    turns = torch.arange(len(ids), device=ids.device)[:, None] % own[..., 0]
    return own.gather(-1, 1 + turns[..., None])[..., 0]


def combine_experts(
    x: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Weighted sum of the outputs of each token's experts, in the order of ``select_experts``: ``[tokens, size]``.

    Args:
        x: ``[tokens, top_k, size]``.
        weights: ``[tokens, top_k]`` float32.
        shared: ``[tokens, size]``, the output of experts that every token has, to add. Its rows may lie apart.
        gate: ``[tokens, 1]`` float32, the sigmoid of which is the weight of ``shared``; None is 1.
        out: as for ``linear``.
    """
    total = (x.float() * weights[..., None]).sum(1)
    if shared is not None:
        total += shared.float() * (1 if gate is None else F.sigmoid(gate))
    return total.to(x.dtype) if out is None else out.copy_(total)
