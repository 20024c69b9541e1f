"""Forward passes that are not captured: those that make other calls than of ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import Batch, ForwardFn


def capture(
    forward: ForwardFn,
    max_tokens: int,
    max_sequences: int,
    max_blocks: int,
    use_lora: bool = False,
    hidden_states: Tensor | None = None,
    *,
    device: torch.device,
    graph_sizes: Sequence[int] = (),
    sampled: Tensor | None = None,
    key_ends: bool = False,
) -> ForwardFn:
    """As ``reference.capture``, for passes that may make any calls, on any device."""

    def run(batch: Batch) -> Tensor:
        batch = batch.to(device)
        if sampled is not None:
            ids = batch.token_ids
            batch.token_ids = torch.where(ids < 0, sampled[(-1 - ids).clamp_min(0)], ids)
        return forward(batch)

    return run
