"""Sampling in plain PyTorch, for the backend ``reference``; ``cpu`` and ``cuda`` have kernels."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Lower bound of the temperature, which avoids a division by zero."""
BIN_SHIFT = 20
"""Number of low bits of a float32 that ``truncate`` ignores to choose a bin: eight bins per power of two."""
ROWS_AT_ONCE = 4
"""Number of rows sampled together. The distributions of more rows would not fit into a CPU's caches, and the allocator
would return their memory to the operating system after each step."""


def argmax_of_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the largest logit of each row of ``[rows, vocabulary]`` float32 (int64; the first one in a
    tie), and this logit.

    If a logit is NaN, the index is an arbitrary one, and the value NaN.
    """
    index = logits.argmax(-1)  # the index of a NaN if there is one
    return index, logits.gather(-1, index[:, None])[:, 0]


def sample_random(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample with temperature, min-p, top-k and top-p, in this order. With temperature 0, the result is that of
    ``argmax_of_logits``.

    Weights are float32, and the largest weight is 1. A token is sampled by inverting the cumulative distribution over
    token ids, which is summed in float64.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        temperature, top_k, top_p, min_p: ``[rows]`` float64, values of ``SamplingParams``.
        uniform: ``[rows]`` float64, a random number in [0, 1) for each row.

    Returns:
        Token ids, ``[rows]`` int64; an arbitrary token of the vocabulary if no token is allowed, or if a logit is NaN
        or infinite. Largest logits, ``[rows]``; NaN if a logit is NaN.
    """
    greedy, largest = argmax_of_logits(logits)
    columns = (column.split(ROWS_AT_ONCE) for column in (logits, temperature, top_k, top_p, min_p, uniform))
    sampled = torch.cat([_invert(truncated_weights(*some), u) for *some, u in zip(*columns, strict=True)])
    return torch.where(temperature == 0, greedy, sampled), largest


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distributions of weights ``[rows, vocabulary]`` at ``uniform``, ``[rows]``."""
    cumulative = weights.double().cumsum(-1)
    thresholds = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def truncated_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights of the tokens after temperature, min-p, top-k and top-p, ``[rows, vocabulary]``. A row without a valid
    distribution has NaN or infinity.

    Args:
        logits, temperature, top_k, top_p, min_p: see ``sample_random``.
    """
    vocabulary = logits.shape[-1]
    scaled = logits / temperature.float()[:, None].clamp(min=MIN_TEMPERATURE)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    if (min_p > 0).any():
        weights.masked_fill_(weights < min_p.float()[:, None], 0)
    valid = weights.sum(-1).isfinite().tolist()  # False if no token is allowed, or a logit is NaN or infinite
    for row, is_valid, k, p in zip(weights, valid, top_k.tolist(), top_p.tolist(), strict=True):
        if not is_valid:
            continue
        if 0 < k < vocabulary:
            truncate(row, torch.ones_like(row, dtype=torch.float64), k)
        if p < 1:
            mass = row.double()
            truncate(row, mass, p * mass.sum().item())
    return weights


def truncate(weights: Tensor, amounts: Tensor, limit: float) -> None:
    """Truncate a distribution in place: keep the most likely tokens until the sum of their ``amounts`` reaches
    ``limit``, and set all other weights to 0. Ties go to the lower token id.

    The amounts are summed in bins by the leading bits of the weights; only the bin that reaches the limit is sorted.

    Args:
        weights: ``[vocabulary]`` float32, not negative.
        amounts: ``[vocabulary]`` float64: ones for top-k, the weights for top-p.
    """
    bins = weights.view(torch.int32) >> BIN_SHIFT  # non-negative floats are ordered like their bits
    cumulative = torch.bincount(bins, amounts).cumsum(0)
    above = cumulative[-1] - cumulative
    edge = int((above < limit).nonzero()[0])
    members = (bins == edge).nonzero()[:, 0]
    members = members[weights[members].argsort(descending=True, stable=True)]
    member_amounts = amounts[members]
    before = above[edge] + member_amounts.cumsum(0) - member_amounts
    weights[members[before >= limit]] = 0
    weights.masked_fill_(bins < edge, 0)
