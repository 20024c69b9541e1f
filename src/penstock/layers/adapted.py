"""What adapters add to a layer's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.ops import LowRank, Ops


class Adapted:
    """A layer's part of each adapter, by the adapter's slot.

    Args:
        slots: adapters there may be at the same time.
    """

    def __init__(self, ops: Ops, slots: int) -> None:
        self._ops = ops
        self._adapters = ops.new_adapters(slots)

    def __call__(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """``[tokens, out]``, which the layer has made of ``x``, with what the adapter of each row adds; -1 is none."""
        return self._ops.add_low_rank(out, x, self._adapters, slots)

    def pack(self, parts: list[LowRank]) -> Any:
        """What ``put`` takes; may be called in another thread than steps are."""
        return self._ops.pack_low_rank(parts)

    def put(self, slot: int, packed: Any | None) -> None:
        """Into a slot that no request uses; None empties it."""
        self._ops.put_low_rank(self._adapters, slot, packed)


@dataclass(frozen=True)
class Target:
    """One of a checkpoint's matrices that adapters may add to."""

    adapted: Adapted
    inputs: int
    outputs: int
    first: int
    """Its first output among the layer's."""
