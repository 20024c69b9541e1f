"""Reader of checkpoints with fused experts: one tensor has a projection of all experts in a layer."""

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
"""Pattern of the name that layers use for an expert's matrix."""


@dataclass(frozen=True)
class _Part:
    """Location of a projection of one expert."""

    tensor: str
    """Name of the fused tensor, without ``_bias``."""
    expert: int
    number: int
    """Index of the projection among those in the tensor."""
    projections: int
    """Number of projections per expert in the tensor."""

    @property
    def matrix(self) -> str:
        """Name of the tensor without ``.weight``, as a quantized matrix."""
        return self.tensor.removesuffix(".weight")


class FusedExperts:
    """``layers.Weights`` with a name for each expert's matrix, ``experts.3.gate_proj.weight``, even if ``base`` has a
    fused tensor ``experts.gate_up_proj``, with biases in ``experts.gate_up_proj_bias``. Only the pages of the file with
    the requested expert are read.

    Args:
        projections: names of an expert's gate, up and down projections in layers.
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
        tensor, expert = part.tensor if kind == "weight" else f"{part.tensor}_{kind}", (part.expert, part.expert + 1)
        outputs, *inputs = shape[0] * part.projections, *shape[1:]

        def read_expert(transposed: bool) -> Tensor:
            sizes = (*inputs, outputs) if transposed else (outputs, *inputs)
            read = self._base.read(tensor, self._num_experts, *sizes, rows=expert, as_stored=as_stored)[0]
            return read.T if transposed else read

        try:
            matrix = read_expert(bool(self._layout.transposed and inputs))
        except PenstockError:
            if self._layout.transposed is not None or not inputs:
                raise
            matrix = read_expert(transposed=True)
        matrix = matrix[self._outputs(part, shape[0])]
        return matrix if rows is None else matrix[rows[0] : rows[1]]

    def has(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        if (part := self._find(module)) is None:
            return self._base.has(name)
        return kind == "weight" or self._base.has(f"{part.tensor}_{kind}")

    def format_of(self, name: str) -> Format:
        """See ``layers.Weights.format_of``. Experts have a scale per output, whatever the tensor has."""
        if (part := self._find(name)) is None:
            return self._base.format_of(name)
        format = self._base.format_of(part.matrix)
        return replace(format, rows_per_scale=1) if format.bits else format

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        """See ``layers.Weights.read_quantized``. The experts are stacked in one matrix."""
        if (part := self._find(name)) is None:
            return self._base.read_quantized(name, outputs, inputs, rows)
        if self._last is None or self._last[:2] != (part.tensor, part.expert):
            size = outputs * part.projections
            expert_rows = part.expert * size, (part.expert + 1) * size
            found = self._base.read_quantized(part.matrix, self._num_experts * size, inputs, expert_rows)
            self._last = part.tensor, part.expert, found  # the next call usually reads the same expert's up projection
        expert = self._last[2]
        chosen = range(outputs * part.projections)[self._outputs(part, outputs)][rows[0] : rows[1]]
        step = slice(chosen.start, chosen.stop, chosen.step)
        if isinstance(expert, Tensor):
            return expert[step]
        expert = expert.with_scale_per_output()
        offsets = None if expert.offsets is None else expert.offsets[step]
        return replace(expert, values=expert.values[step], scales=expert.scales[step], offsets=offsets)

    def _find(self, name: str) -> _Part | None:
        """Location of an expert's matrix; None for other matrices, and for experts that are not fused."""
        if not (found := EXPERT.fullmatch(name)) or found[3] not in self._projections:
            return None
        number = self._projections.index(found[3])
        tensor = f"{found[1].removesuffix('experts')}{self._layout.tensors[number == 2]}"
        part = _Part(tensor, int(found[2]), number % 2, 1 if number == 2 else 2)
        return part if self._base.has(tensor) or self._base.format_of(part.matrix).bits else None

    def _outputs(self, part: _Part, size: int) -> slice:
        """The slice of an expert's outputs that belongs to a projection with ``size`` outputs."""
        if part.projections == 1:
            return slice(size)
        if self._layout.interleaved:
            return slice(part.number, 2 * size, 2)
        return slice(part.number * size, (part.number + 1) * size)
