"""NVFP4 checkpoints (NVIDIA, 2025): 4-bit floating-point numbers (e2m1), a scale (e4m3) per 16 inputs, and a scale per
matrix.

Twice a number is an integer from -12 to 12. So the weights are 8-bit integers in groups, without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import Format
from penstock.ops import QuantizedWeight

from .checkpoint_format import TensorSource, read_tensor
from .config_fields import unsupported
from .fp8 import FP8

GROUP = 16
"""Number of inputs that share a scale."""
FORMAT = Format(8, GROUP)
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number of each code."""


def read_nvfp4(
    source: TensorSource,
    packed: str,
    scales: str,
    with_factor: Callable[[Tensor], Tensor],
    outputs: int,
    inputs: int,
    rows: tuple[int, int],
) -> QuantizedWeight:
    """Read outputs ``rows`` of a matrix.

    Args:
        packed: tensor of the codes ``[out, in / 2]`` uint8, the first of two inputs in the lower half of a byte.
        scales: tensor of the scales of groups ``[out, in / 16]`` e4m3.
        with_factor: applies the scale of the matrix to the scales of groups, float32.
    """
    if inputs % GROUP:
        raise invalid("model", f"tensor {packed} is in NVFP4, whose inputs must be a multiple of {GROUP}: {inputs}")
    codes = read_tensor(source, packed, outputs, inputs // 2, dtypes=(torch.uint8,), rows=rows)
    stored = read_tensor(source, scales, outputs, inputs // GROUP, dtypes=(torch.float8_e4m3fn,), rows=rows)
    table = torch.tensor(TWICE, dtype=torch.int8)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]
    return QuantizedWeight(values, with_factor(stored.float()) / 2, FORMAT)


class ModelOptNVFP4:
    """``CheckpointFormat`` for NVFP4 of NVIDIA Model Optimizer: ``<name>.weight``, ``weight_scale`` and
    ``weight_scale_2``. Matrices without ``weight_scale_2`` may be in fp8 (``quant_algo`` MIXED_PRECISION)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._fp8 = FP8({"activation_scheme": "static"})
        self.notes: Sequence[str] = self._fp8.notes

    def format_of(self, source: TensorSource, name: str) -> Format:
        """See ``CheckpointFormat.format_of``."""
        return FORMAT if source.has(f"{name}.weight_scale_2") else self._fp8.format_of(source, name)

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """See ``CheckpointFormat.shape``."""
        outputs, inputs = source.shape(f"{name}.weight")
        return outputs, inputs * (2 if source.has(f"{name}.weight_scale_2") else 1)

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """See ``CheckpointFormat.read``."""
        tensor = f"{name}.weight_scale_2"
        if not source.has(tensor):
            return self._fp8.read(source, name, outputs, inputs, rows)
        if (shape := source.shape(tensor)) not in ((), (1,)):
            raise unsupported(f"NVFP4 with {tensor} of shape {shape}; it must be a number")
        factor = read_tensor(source, tensor, *shape, dtypes=(torch.float32,)).reshape(())
        stored = f"{name}.weight", f"{name}.weight_scale"
        return read_nvfp4(source, *stored, lambda scales: scales * factor, outputs, inputs, rows)
