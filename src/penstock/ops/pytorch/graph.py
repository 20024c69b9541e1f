"""Forward passes and their memory: nothing is captured here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batch import Batch, ForwardFn

CPU = torch.device("cpu")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.empty``: memory for an op's ``out``, in a captured step, too."""
    return torch.empty(shape, dtype=dtype, device=device)


def is_capturing() -> bool:
    """Whether this thread captures a forward pass, which must make calls of ops alone."""
    return False


def capture(
    forward: ForwardFn,
    max_tokens: int,
    max_sequences: int,
    max_blocks: int,
    use_lora: bool = False,
    hidden_states: Tensor | None = None,
    *,
    device: torch.device = CPU,
    graph_sizes: Sequence[int] = (),
    sampled: Tensor | None = None,
    key_ends: bool = False,
) -> ForwardFn:
    """The forward pass in the form that this backend runs fastest: over batches in host memory. Its result is on the
    device, and valid until the next call.

    Args:
        forward: makes the same calls of ops for every batch, and nothing else.
        max_tokens, max_sequences: of a batch.
        max_blocks: of a sequence.
        use_lora: whether its batches have ``lora_slots``.
        hidden_states: ``[max_tokens, hidden]``, for batches that have ``hidden_states``: memory for them.
        device: that ``forward`` computes on.
        graph_sizes: numbers of sequences to capture CUDA graphs for.
        sampled: int64 on the device: the tokens that the step before has sampled, to which token ids of a batch may
            refer where the backend is ``ASYNCHRONOUS``.
        key_ends: whether its batches have ``AttentionMetadata.key_ends``; on CPUs only.
    """
    if device.type == "cpu":
        return forward

    def run(batch: Batch) -> Tensor:
        moved = batch.to(device)
        out = forward(moved)
        batch.aux_hidden_states = moved.aux_hidden_states
        return out

    return run
