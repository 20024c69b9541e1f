"""Mixture of experts (Shazeer et al., 2017): selection of experts, and combination of their outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.experts_config import Routing


def select_experts(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    token_ids: Tensor | None = None,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the experts of each token: ids ``[tokens, top_k]`` int64, best first (ties: lower id), and weights
    ``[tokens, top_k]`` float32.

    Args:
        logits: ``[tokens, experts]`` float32.
        bias: ``[experts]`` float32, added to the scores for the selection of groups and experts, but not for the
            weights.
        factors: ``[experts]`` float32, multiplied with the weights of the chosen experts.
        token_ids: ``[tokens]`` int64, with ``table``.
        table: experts of each token id, ``[vocabulary, top_k]`` int64 (hash routing); None: chosen by score.
    """
    match routing.scores:
        case "softmax":
            scores = logits.softmax(-1)
        case "sigmoid":
            scores = logits.sigmoid()
        case "sqrtsoftplus":
            scores = F.softplus(logits).sqrt()
    biased = scores if bias is None else scores + bias
    if routing.top_groups < routing.groups:
        grouped = biased.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(1 if routing.group_score == "max" else 2).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(routing.top_groups).indices, 1).bool()
        biased = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    if table is not None and token_ids is not None:
        ids = table[token_ids]
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=routing.min_sum) + routing.added_sum)
    weights = weights * routing.scale
    return ids, weights if factors is None else weights * factors[ids]


def count_experts(ids: Tensor, counts: Tensor, num_tokens: Tensor | None = None) -> None:
    """Add the number of tokens of each expert to ``counts``.

    Args:
        ids: ``[tokens, top_k]`` int64, from ``select_experts``.
        counts: ``[experts]`` int64, updated in place.
        num_tokens: ``[1]`` int32: number of leading tokens to count; None: all tokens.
    """
    one = torch.ones_like(ids)
    if num_tokens is not None:
        one *= (torch.arange(len(ids), device=ids.device) < num_tokens)[:, None]
    counts.scatter_add_(0, ids.flatten(), one.flatten())


def place_experts(ids: Tensor, places: Tensor) -> Tensor:
    """Map logical to physical expert ids, ``[tokens, top_k]`` int64. Tokens use the replicas of an expert round-robin.

    Args:
        ids: logical expert ids, ``[tokens, top_k]`` int64, from ``select_experts``.
        places: ``[experts, 1 + max replicas]`` int64: number of replicas of each expert, then the physical ids of the
            replicas, numbered over all ranks.
    """
    candidates = places[ids]
    replica = torch.arange(len(ids), device=ids.device)[:, None] % candidates[..., 0]
    return candidates.gather(-1, 1 + replica[..., None])[..., 0]


def combine_experts(
    x: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, ``[tokens, size]``, summed in the order of ``x``.

    Args:
        x: outputs of the experts, ``[tokens, top_k, size]``.
        weights: ``[tokens, top_k]`` float32.
        shared: output of shared experts to add, ``[tokens, size]``; rows may be strided.
        gate: ``[tokens, 1]`` float32: the sigmoid of this value is the weight of ``shared``; None: weight 1.
        out: memory for the result (see ``linear``).
    """
    total = (x.float() * weights[..., None]).sum(1)
    if shared is not None:
        total += shared.float() * (1 if gate is None else F.sigmoid(gate))
    return total.to(x.dtype) if out is None else out.copy_(total)
