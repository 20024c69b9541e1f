"""What quantization changes in the model's predictions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from penstock.models.model import Model

ROWS = 256
"""Tokens whose logits are computed at a time."""


def compare(model: Model, original: Tensor, quantized: Tensor, samples: Tensor) -> dict[str, Any]:
    """Compare predictions of the next token.

    Args:
        model: whose last stage computes logits.
        original, quantized: final hidden states ``[samples, tokens, hidden]`` of both models.
        samples: token ids ``[samples, tokens]``.
    """
    targets = samples[:, 1:].flatten()
    before, after = (hidden[:, :-1].flatten(0, 1) for hidden in (original, quantized))
    losses, divergence, agreeing = torch.zeros(2, dtype=torch.float64), 0.0, 0
    for first in range(0, len(targets), ROWS):
        rows = slice(first, first + ROWS)
        own, other = (model.logits(hidden[rows].contiguous()).log_softmax(-1) for hidden in (before, after))
        for place, logprobs in enumerate((own, other)):
            losses[place] -= logprobs.gather(1, targets[rows, None]).sum(dtype=torch.float64)
        divergence += float((own.exp() * (own - other)).sum(dtype=torch.float64))
        agreeing += int((own.argmax(-1) == other.argmax(-1)).sum())
    count = len(targets)
    mean = (losses / count).tolist()
    return {
        "tokens": count,
        "perplexity_original": math.exp(mean[0]),
        "perplexity_quantized": math.exp(mean[1]),
        "kl_divergence": divergence / count,
        "top1_agreement": agreeing / count,
    }


def relative_error(original: Tensor, quantized: Tensor) -> float:
    """The squares of what changed in hidden states ``[samples, tokens, hidden]``, as a share of their squares."""
    change = size = 0.0
    for before, after in zip(original, quantized, strict=True):
        change += float((after.float() - before.float()).square().sum(dtype=torch.float64))
        size += float(before.float().square().sum(dtype=torch.float64))
    return change / max(size, 1e-30)
