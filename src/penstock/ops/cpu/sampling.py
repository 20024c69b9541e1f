"""Argmax and random sampling of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _kernels


def argmax_of_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.argmax_of_logits``."""
    return sample_random(logits, *[torch.zeros(logits.shape[0], dtype=torch.float64)] * 5)


def sample_random(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``reference.sample_random``. The token of a row has the same bits for every instruction set."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    columns = torch.stack((temperature, top_k, top_p, min_p, uniform))
    assert logits.dtype is torch.float32 and columns.dtype is torch.float64 and columns.shape[1] == rows and vocabulary
    out, largest = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    pointers = logits.data_ptr(), columns.data_ptr(), out.data_ptr(), largest.data_ptr()
    _kernels.sample_random(*pointers, rows, logits.stride(0), vocabulary)
    return out, largest
