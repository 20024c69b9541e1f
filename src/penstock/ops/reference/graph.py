"""Forward passes and their memory: nothing is captured here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch import Batch, CaptureOptions, ForwardFn


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.empty``: memory for an op's ``out``, in a captured step, too."""
    return torch.empty(shape, dtype=dtype, device=device)


def is_capturing() -> bool:
    """Whether this thread captures a forward pass, which must make calls of ops alone."""
    return False


def capture(forward: ForwardFn, options: CaptureOptions) -> ForwardFn:
    """The forward pass in the form that this backend runs fastest: over batches in host memory. Its result is on the
    device, and valid until the next call.

    Args:
        forward: makes the same calls of ops for every batch, and nothing else; here it may make any calls.
    """
    device, sampled = options.device, options.sampled
    if device.type == "cpu" and sampled is None:
        return forward

    def run(batch: Batch) -> Tensor:
        moved = batch.to(device)
        if sampled is not None:
            ids = moved.token_ids
            moved.token_ids = torch.where(ids < 0, sampled[(-1 - ids).clamp_min(0)], ids)
        out = forward(moved)
        batch.aux_hidden_states = moved.aux_hidden_states
        return out

    return run
