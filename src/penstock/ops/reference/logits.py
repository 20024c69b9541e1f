"""Ops on logits for sampling. Backends without kernels for these ops use them, too."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Set forbidden logits to minus infinity, in place. Returns the logits.

    Args:
        logits: ``[rows, outputs]``.
        bitmask: ``[rows, ceil(outputs / 32)]`` int32 with a bit set for each allowed output, the lowest bit first.
    """
    packed = bitmask.numpy(force=True).view(np.uint8)
    is_allowed = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
    return logits.masked_fill_(torch.from_numpy(is_allowed == 0).to(logits.device), float("-inf"))


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log probabilities of logits ``[rows, outputs]`` float32."""
    return logits.log_softmax(-1)


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values of each row of ``[rows, outputs]`` and their indices (int64), largest first."""
    result = values.topk(k, -1)
    return result.values, result.indices
