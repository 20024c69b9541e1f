"""Random sampling, in plain PyTorch: part of ``reference``, and what computes it on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
BIN_SHIFT = 20
"""Low bits of a float32 that its bin (``truncate``) leaves out: eight bins for each power of two."""


def sample_random(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Sample with temperature, min-p, top-k and top-p, in this order.

    A random number is mapped to a token by the inverse of the cumulative distribution in the order of token ids, summed
    in float64.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        temperature, top_k, top_p, min_p: ``[rows]`` float64, values of ``SamplingParams``. Weights, whose largest is 1,
            are float32.
        uniform: ``[rows]`` float64, a random number in [0, 1) for each row.

    Returns:
        Token ids, ``[rows]`` int64; some token of the vocabulary where none is allowed, or a logit is not finite.
    """
    vocabulary = logits.shape[-1]
    scaled = logits / temperature.float()[:, None].clamp(min=MIN_TEMPERATURE)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    if (min_p > 0).any():
        weights.masked_fill_(weights < min_p.float()[:, None], 0)
    valid = weights.sum(-1).isfinite().tolist()  # False where no token is allowed, or a logit is NaN or infinite
    for row, is_valid, k, p in zip(weights, valid, top_k.tolist(), top_p.tolist(), strict=True):
        if not is_valid:
            continue
        if 0 < k < vocabulary:
            truncate(row, torch.ones_like(row, dtype=torch.float64), k)
        if p < 1:
            mass = row.double()
            truncate(row, mass, p * mass.sum().item())
    cumulative = weights.double().cumsum(-1)
    thresholds = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1).clamp(max=vocabulary - 1)


def truncate(weights: Tensor, amounts: Tensor, limit: float) -> None:
    """Truncate a distribution in place: keep the likeliest tokens until their ``amounts`` reach ``limit``, and set the
    weights of the others to 0. Of equal weights, that of the lower token id comes first.

    Only a part is sorted: tokens are counted into bins by the leading bits of their weights, and those of the bin in
    which the limit is reached are sorted.

    Args:
        weights: ``[vocabulary]`` float32, none negative.
        amounts: ``[vocabulary]`` float64: ones for top-k, the weights for top-p.
    """
    bins = weights.view(torch.int32) >> BIN_SHIFT  # floats that are not negative sort as their bits do
    held = torch.bincount(bins, amounts).cumsum(0)
    above = held[-1] - held
    edge = int((above < limit).nonzero()[0])
    members = (bins == edge).nonzero()[:, 0]
    members = members[weights[members].argsort(descending=True, stable=True)]
    own = amounts[members]
    before = above[edge] + own.cumsum(0) - own
    weights[members[before >= limit]] = 0
    weights.masked_fill_(bins < edge, 0)
