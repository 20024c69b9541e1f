"""What layers are built with: a backend, a rank's group, and where weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.ops import Ops
from penstock.parallel import ALONE, Group
from penstock.quant import UNCHANGED, Scheme


class Weights(Protocol):
    """A checkpoint's tensors by name."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in the checkpoint's own dtype; raises ``PenstockError`` where name or shape do not fit."""
        ...


@dataclass(frozen=True)
class Context:
    """Shared by all layers of a model."""

    ops: Ops
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE
    scheme: Scheme = UNCHANGED

    def take(self, name: str, *shape: int) -> Tensor:
        """A whole tensor, in the dtype and on the device that the model computes with."""
        return self.weights.take(name, *shape).to(self.device, self.dtype)
