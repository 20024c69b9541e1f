"""Checkpoints whose experts are 4-bit floating-point numbers with a scale each 32 inputs (mxfp4; OCP Microscaling
Formats specification, 2023), as gpt-oss is published."""

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
    """``[..., groups, 16]`` uint8, two codes a byte and the first in its lower half, to ``[..., groups * 32]`` int8:
    codes less 8, as ``QuantizedWeight`` has them."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)
    return codes.view(torch.int8).sub_(8)


def scales_of(exponents: Tensor) -> Tensor:
    """Exponents with 127 added (e8m0) as powers of two, float32; 255 is no number."""
    bits = exponents.int() << 23  # float32's own exponent, of which 0 stands for less
    return torch.where(exponents == 0, 1 << 22, bits).view(torch.float32)


class MXFP4:
    """``CheckpointFormat`` of experts: ``<name>_blocks`` ``[experts, out, in / 32, 16]`` uint8 and ``<name>_scales``
    ``[experts, out, in / 32]`` uint8. The matrix of a name has the outputs of all experts, one expert after the other.
    Everything else is not quantized."""

    notes: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Of a ``quantization_config``, of which nothing needs to be known: what is quantized has ``_blocks``."""

    def format_of(self, source: TensorSource, name: str) -> Format:
        """As ``CheckpointFormat.format_of``."""
        return FORMAT if source.has(f"{name}_blocks") else UNQUANTIZED

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """As ``CheckpointFormat.read``."""
        shape = source.shape(f"{name}_blocks")
        if len(shape) != 4 or shape[0] * shape[1] != outputs or shape[2] * MX_BLOCK != inputs:
            message = f"tensor {name}_blocks has shape {shape}, config.json wants {outputs} outputs of {inputs} inputs"
            raise invalid("model", message)
        experts, each, groups, _ = shape
        own = rows[0] // each, -(-rows[1] // each)
        blocks = read_tensor(source, f"{name}_blocks", experts, each, groups, 16, dtypes=BYTES, rows=own)
        exponents = read_tensor(source, f"{name}_scales", experts, each, groups, dtypes=BYTES, rows=own)
        wanted = slice(rows[0] - own[0] * each, rows[1] - own[0] * each)
        return QuantizedWeight(unpack(blocks.flatten(0, 1)[wanted]), scales_of(exponents.flatten(0, 1)[wanted]), FORMAT)
