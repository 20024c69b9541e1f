"""What layers are built with: a backend, a rank's group, and where weights come from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.core import PenstockError
from penstock.ops import Format, Ops
from penstock.parallel import ALONE, Group
from penstock.quant import UNCHANGED, Matrix, Scheme

from .adapted import Adapted, Target

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """A checkpoint's tensors by name."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in the checkpoint's own dtype; raises ``PenstockError`` where name or shape do not fit."""
        ...


class Kept(Protocol):
    """Packed matrices from an earlier start, by name."""

    mapped_bytes: int
    """Of what was found on disk."""

    def find(self, name: str) -> dict[str, Tensor] | None: ...
    def keep(self, name: str, tensors: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Context:
    """Shared by all layers of a model."""

    ops: Ops
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE
    scheme: Scheme = UNCHANGED
    kept: Kept | None = None
    max_loras: int = 0
    """Adapters that there may be at the same time."""
    targets: dict[str, Target] = field(default_factory=dict)
    """What they may add to, by the names of the checkpoint's matrices."""

    def take(self, name: str, *shape: int) -> Tensor:
        """A whole tensor, in the dtype and on the device that the model computes with."""
        return self.weights.take(name, *shape).to(self.device, self.dtype)

    def adapted(self, names: list[str], inputs: int, outputs: list[int]) -> Adapted | None:
        """What adapters add to a layer of these matrices; None where there are no adapters."""
        if not self.max_loras:
            return None
        adapted, first = Adapted(self.ops, self.max_loras), 0
        for name, size in zip(names, outputs, strict=True):
            self.targets[name] = Target(adapted, inputs, size, first)
            first += size
        return adapted

    def matrix(
        self,
        name: str,
        inputs: int,
        outputs: int,
        format: Format,
        parts: Callable[[], list[Tensor]],
        bias: Tensor | None = None,
    ) -> Matrix:
        """``[outputs, inputs]`` in a format, as an earlier start kept it, or made of ``parts``, rows after rows."""
        if self.kept and (found := self.kept.find(name)):
            try:
                return Matrix(self.ops, self.ops.restore(found, inputs, outputs, self.dtype, bias, format))
            except PenstockError as error:
                logger.warning("%s is packed again: %s", name, error)
        matrix = self.ops.pack(parts(), bias, format)
        if self.kept:
            self.kept.keep(name, self.ops.packed(matrix))
        return Matrix(self.ops, matrix)
