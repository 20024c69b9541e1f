"""Reader of checkpoints with other tensor names, or several matrices in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from penstock.core.quantization import Format
from penstock.layers import Weights
from penstock.ops import QuantizedWeight

from ..stored import Stored

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused matrix in checkpoints and adapters → the matrices that it consists of, which have the same input."""


class RenamedWeights:
    """``layers.Weights`` that maps names of modules to their location in ``base``.

    Args:
        find: function from the name of a module to its location.
    """

    def __init__(self, base: Weights, find: Callable[[str], Stored]) -> None:
        self._base = base
        self._find = find

    @property
    def version(self) -> str:
        return self._base.version

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        stored, name = self._located(name)
        if not stored.ranges:
            return self._base.read(name, *shape, rows=rows, as_stored=as_stored)
        shape = (stored.total, *shape[1:])
        wanted = rows or (0, sum(end - first for first, end in stored.ranges))
        parts = [self._base.read(name, *shape, rows=each, as_stored=as_stored) for each in stored.rows(wanted)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def has(self, name: str) -> bool:
        return self._base.has(self._located(name)[1])

    def _located(self, name: str) -> tuple[Stored, str]:
        """Location of a tensor's module, and the name of the tensor in ``base``."""
        module, _, suffix = name.rpartition(".")
        stored = self._find(module)
        stored_name = f"{stored.name}.{suffix}".removeprefix(".")
        if stored.other and not self._base.has(stored_name):
            stored_name = f"{stored.other}.{suffix}"
        return stored, stored_name

    def _matrix(self, name: str) -> tuple[Stored, str]:
        """Location of a matrix, and its name in ``base``, without ``.weight``."""
        stored, weight = self._located(f"{name}.weight")
        return stored, weight.removesuffix(".weight")

    def format_of(self, name: str) -> Format:
        return self._base.format_of(self._matrix(name)[1])

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        stored, name = self._matrix(name)
        if not stored.ranges:
            return self._base.read_quantized(name, outputs, inputs, rows)
        parts = [self._base.read_quantized(name, stored.total, inputs, each) for each in stored.rows(rows)]
        return parts[0] if len(parts) == 1 else _stack(parts)


def _stack(parts: list[QuantizedWeight | Tensor]) -> QuantizedWeight | Tensor:
    """Concatenate parts of a matrix by rows."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    offsets = [part.offsets for part in quantized if part.offsets is not None]
    return replace(
        first,
        values=torch.cat([part.values for part in quantized]),
        scales=torch.cat([part.scales for part in quantized]),
        offsets=torch.cat(offsets) if offsets else None,
    )
