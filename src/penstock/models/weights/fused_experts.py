"""Checkpoints that have a projection of all experts of a layer in one tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.checkpoint.experts_config import FusedLayout
from penstock.core import PenstockError
from penstock.core.quantization import Format
from penstock.layers import Weights
from penstock.ops import QuantizedWeight

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.([^.]+)")
"""The name of a matrix of one expert, as layers ask for it."""


@dataclass(frozen=True)
class _Part:
    """A projection of one expert."""

    tensor: str
    """Of all experts, without ``_bias``."""
    expert: int
    number: int
    projections: int
    """That the tensor has of each expert."""


class FusedExperts:
    """``layers.Weights`` that has each expert's matrices under names of their own, ``experts.3.gate_proj.weight``, also
    where the base has them in one tensor ``experts.gate_up_proj``, and biases in ``experts.gate_up_proj_bias``. Only
    the pages of a file that hold the expert are read.

    Args:
        projections: names of an expert's gate, up and down projections, as layers ask for them.
    """

    def __init__(self, base: Weights, num_experts: int, projections: tuple[str, str, str], layout: FusedLayout) -> None:
        self._base = base
        self._num_experts = num_experts
        self._projections = projections
        self._layout = layout
        self._last: tuple[str, int, QuantizedWeight | Tensor] | None = None

    @property
    def version(self) -> str:
        return self._base.version

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        module, _, kind = name.rpartition(".")
        if (part := self._find(module)) is None:
            return self._base.read(name, *shape, rows=rows, as_stored=as_stored)
        tensor, own = part.tensor if kind == "weight" else f"{part.tensor}_{kind}", (part.expert, part.expert + 1)
        outputs, *inputs = shape[0] * part.projections, *shape[1:]

        def whole(transposed: bool) -> Tensor:
            sizes = (*inputs, outputs) if transposed else (outputs, *inputs)
            read = self._base.read(tensor, self._num_experts, *sizes, rows=own, as_stored=as_stored)[0]
            return read.T if transposed else read

        try:
            matrix = whole(bool(self._layout.transposed and inputs))
        except PenstockError:
            if self._layout.transposed is not None or not inputs:
                raise
            matrix = whole(transposed=True)
        matrix = matrix[self._outputs(part, shape[0])]
        return matrix if rows is None else matrix[rows[0] : rows[1]]

    def has(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        if (part := self._find(module)) is None:
            return self._base.has(name)
        return kind == "weight" or self._base.has(f"{part.tensor}_{kind}")

    def format_of(self, name: str) -> Format:
        part = self._find(name)
        return self._base.format_of(part.tensor if part else name)

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        """See ``layers.Weights.read_quantized``. Experts lie below each other in one matrix."""
        if (part := self._find(name)) is None:
            return self._base.read_quantized(name, outputs, inputs, rows)
        if self._last is None or self._last[:2] != (part.tensor, part.expert):
            size = outputs * part.projections
            own = part.expert * size, (part.expert + 1) * size
            found = self._base.read_quantized(part.tensor, self._num_experts * size, inputs, own)
            self._last = part.tensor, part.expert, found  # of which the other projection is read next
        whole = self._last[2]
        chosen = range(outputs * part.projections)[self._outputs(part, outputs)][rows[0] : rows[1]]
        step = slice(chosen.start, chosen.stop, chosen.step)
        if isinstance(whole, Tensor):
            return whole[step]
        assert whole.format.rows_per_scale == 1
        offsets = None if whole.offsets is None else whole.offsets[step]
        return replace(whole, values=whole.values[step], scales=whole.scales[step], offsets=offsets)

    def _find(self, name: str) -> _Part | None:
        """Where an expert's matrix lies; None if it lies under its own name, or is no expert's."""
        if not (found := EXPERT.fullmatch(name)) or found[3] not in self._projections:
            return None
        number = self._projections.index(found[3])
        tensor = f"{found[1].removesuffix('experts')}{self._layout.tensors[number == 2]}"
        if not self._base.has(tensor) and not self._base.format_of(tensor).bits:
            return None
        return _Part(tensor, int(found[2]), number % 2, 1 if number == 2 else 2)

    def _outputs(self, part: _Part, size: int) -> slice:
        """Which of an expert's outputs are those of a projection of so many."""
        if part.projections == 1:
            return slice(size)
        if self._layout.interleaved:
            return slice(part.number, 2 * size, 2)
        return slice(part.number * size, (part.number + 1) * size)
