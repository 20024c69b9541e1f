"""Interface of layers with recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import Batch


class HasState(Protocol):
    """A layer that keeps a state of fixed size per sequence, in place of keys and values or beside them."""

    state_index: int
    """Index of the layer's state in ``StateBatch.cache``, set by the model."""

    def state_spec(self) -> StateSpec:
        """Shape of this rank's state."""
        ...


class StateLayer(HasState, Protocol):
    """A layer with a state that is separate from attention."""

    def __call__(self, x: Tensor, batch: Batch, logits_only: bool) -> Tensor:
        """Apply all tokens to the states of their sequences.

        Args:
            x: ``[tokens, hidden]``.
            logits_only: return only the rows ``batch.logits_indices``, as the last layer of a model does.

        Returns:
            ``[tokens, hidden]``, or ``[rows, hidden]`` with ``logits_only``.
        """
        ...


def new_state_cache(
    specs: Sequence[StateSpec], slots: int, rows: int, max_drafts: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """Allocate ``StateBatch.cache``, filled with zeros.

    Args:
        specs: state of each recurrent layer.
        rows: number of slots, from the first, that keep inputs of up to ``max_drafts`` draft tokens.
    """

    def zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    return [
        {name: zeros((slots, *part.shape), part.dtype) for name, part in spec.state.items()}
        | {name: zeros((rows, max_drafts, *part.shape), part.dtype) for name, part in spec.inputs.items()}
        for spec in specs
    ]
