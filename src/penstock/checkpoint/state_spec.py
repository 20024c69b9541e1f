"""Recurrent state of a layer: what a sequence keeps instead of keys and values of every token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .kv_spec import ITEM_BYTES

MAX_SIZE = 2**24
"""Maximum size of a part of a layer; no known model has more."""


@dataclass(frozen=True)
class StateTensor:
    """A part of a layer's state, or of the inputs that change it."""

    shape: tuple[int, ...]
    dtype: str
    """Key of ``ITEM_BYTES``."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StateSpec:
    """State of one layer on one rank, for one sequence.

    The state is that after the sequence's last verified token. ``inputs`` of draft tokens are kept until the next step,
    which applies those of the accepted drafts to the state: thus a rejected draft never changes a state.
    """

    state: Mapping[str, StateTensor]
    """Parts of the state, by name."""
    inputs: Mapping[str, StateTensor] = field(default_factory=dict)
    """Inputs of one token, by name."""

    def bytes_per_slot(self, max_drafts: int) -> int:
        """Bytes of a sequence's state, with the inputs of ``max_drafts`` draft tokens."""
        state, inputs = (sum(each.bytes for each in parts.values()) for parts in (self.state, self.inputs))
        return state + max_drafts * inputs


def bytes_per_slot(specs: Sequence[StateSpec], max_drafts: int = 0) -> int:
    """Bytes of a sequence's states in all layers."""
    return sum(spec.bytes_per_slot(max_drafts) for spec in specs)


def check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` for a size that no model has.

    Args:
        sizes: sizes by name, for the error message.
    """
    for name, size in sizes.items():
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"{name} is {size}; it must be from 1 to {MAX_SIZE}")
