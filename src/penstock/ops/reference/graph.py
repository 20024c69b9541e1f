"""Memory and execution of forward passes, without capturing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch import Batch, CaptureOptions, ForwardFn


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate the ``out`` of an op, like ``torch.empty``. Captured steps may call this function, too."""
    return torch.empty(shape, dtype=dtype, device=device)


def is_capturing() -> bool:
    """True if this thread captures a forward pass, which then must only call ops."""
    return False


def capture(forward: ForwardFn, options: CaptureOptions) -> ForwardFn:
    """Capture a forward pass for fast execution on batches in host memory.

    The result of a call is on the device, and valid until the next call.

    Args:
        forward: forward pass that calls the same ops for every batch, and nothing else. The reference backend accepts
            any forward pass.
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
