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

    def format_of(self, name: str) -> Format:
        """See ``layers.Weights.format_of``. A matrix that shares blocks of scales with another matrix in the same
        tensor has a scale per output."""
        stored, module = self._located_matrix(name)
        format = self._base.format_of(module)
        block, bounds = format.rows_per_scale, {bound for each in stored.ranges for bound in each} - {stored.total}
        if block > 1 and any(bound % block for bound in bounds):
            return replace(format, rows_per_scale=1)
        return format

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        stored, module = self._located_matrix(name)
        if not stored.ranges:
            return self._base.read_quantized(module, outputs, inputs, rows)
        parts = [self._base.read_quantized(module, stored.total, inputs, each) for each in stored.rows(rows)]
        return parts[0] if len(parts) == 1 else _stack(parts)

    def stored_matrix(self, name: str) -> str:
        """The name in ``base`` of the tensor that contains a matrix, without ``.weight``."""
        return self._located_matrix(name)[1]

    def _located_matrix(self, name: str) -> tuple[Stored, str]:
        """Location of a matrix, which may be quantized, and its name in ``base``."""
        stored = self._find(name)
        if not stored.other or self._base.format_of(stored.name).bits or self._base.has(f"{stored.name}.weight"):
            return stored, stored.name
        return stored, stored.other


def _stack(parts: list[QuantizedWeight | Tensor]) -> QuantizedWeight | Tensor:
    """Concatenate parts of a matrix by rows."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    block = first.format.rows_per_scale
    is_uneven = block > 1 and any(len(part.values) % block for part in quantized[:-1])
    if is_uneven or any(part.format != first.format for part in quantized):
        quantized = [part.with_scale_per_output() for part in quantized]
    offsets = [part.offsets for part in quantized if part.offsets is not None]
    return replace(
        quantized[0],
        values=torch.cat([part.values for part in quantized]),
        scales=torch.cat([part.scales for part in quantized]) if block else first.scales,  # one scale for the tensor
        offsets=torch.cat(offsets) if offsets else None,
    )
