"""MXFP4 checkpoints (OCP Microscaling Formats specification, 2023), such as gpt-oss: experts in 4-bit floating-point
numbers (e2m1) with one power-of-two scale per 32 inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import MX_BLOCK, UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from .checkpoint_format import TensorSource, read_tensor

FORMAT = Format(4, MX_BLOCK, floating=True)
BYTES = (torch.uint8,)


def unpack(blocks: Tensor) -> Tensor:
    """Unpack ``[..., groups, 16]`` uint8 (two codes per byte, the first in the lower half) to ``[..., groups * 32]``
    int8: codes minus 8, as in ``QuantizedWeight.values``."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)
    return codes.view(torch.int8).sub_(8)


def scales_of(exponents: Tensor) -> Tensor:
    """Convert e8m0 exponents (bias 127) to powers of two, float32; 255 gives an infinity."""
    bits = exponents.int() << 23  # exponent field of float32; exponent 0 is 2**-127, a subnormal float32
    return torch.where(exponents == 0, 1 << 22, bits).view(torch.float32)


class MXFP4:
    """``CheckpointFormat`` for MXFP4 experts: ``<name>_blocks`` ``[experts, out, in / 32, 16]`` uint8, and
    ``<name>_scales`` ``[experts, out, in / 32]`` uint8. The matrix ``<name>`` has the outputs of all experts, one
    expert after the other. Other matrices are not quantized."""

    notes: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Create the reader. ``config`` is ignored: the names of tensors show which matrices are quantized."""

    def format_of(self, source: TensorSource, name: str) -> Format:
        """See ``CheckpointFormat.format_of``. A matrix with a tensor ``<name>_blocks`` is quantized."""
        return FORMAT if source.has(f"{name}_blocks") else UNQUANTIZED

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """See ``CheckpointFormat.shape``."""
        experts, height, groups, _ = source.shape(f"{name}_blocks")
        return experts * height, groups * MX_BLOCK

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """See ``CheckpointFormat.read``."""
        shape = source.shape(f"{name}_blocks")
        if len(shape) != 4 or shape[0] * shape[1] != outputs or shape[2] * MX_BLOCK != inputs:
            needed = f"{outputs} outputs of {inputs} inputs"
            raise invalid("model", f"tensor {name}_blocks has shape {shape}; config.json requires {needed}")
        experts, height, groups, _ = shape
        needed_experts = rows[0] // height, -(-rows[1] // height)
        blocks = read_tensor(source, f"{name}_blocks", experts, height, groups, 16, dtypes=BYTES, rows=needed_experts)
        exponents = read_tensor(source, f"{name}_scales", experts, height, groups, dtypes=BYTES, rows=needed_experts)
        cut = slice(rows[0] - needed_experts[0] * height, rows[1] - needed_experts[0] * height)
        return QuantizedWeight(unpack(blocks.flatten(0, 1)[cut]), scales_of(exponents.flatten(0, 1)[cut]), FORMAT)
