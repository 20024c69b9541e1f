"""What formats of quantized checkpoints have in common: how the matrices of each lie in a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import Format
from penstock.ops import QuantizedWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class TensorSource(Protocol):
    """Tensors of a checkpoint by name; ``layers.Weights`` documents them."""

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor: ...
    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ``PenstockError`` (``invalid``) where the checkpoint has none of the name."""
        ...


class CheckpointFormat(Protocol):
    """Reads the matrices of a quantized checkpoint. Each module of ``quant/`` that has one makes it of the
    checkpoint's ``quantization_config``."""

    notes: Sequence[str]
    """What is computed otherwise than the checkpoint asks for, for the log."""

    def format_of(self, source: TensorSource, name: str) -> Format:
        """The format of a matrix; ``UNQUANTIZED`` where the checkpoint has it as a tensor ``<name>.weight`` of
        floating-point numbers. Reads nothing but names and shapes of tensors.

        Args:
            name: without ``.weight``.
        """
        ...

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight | Tensor:
        """Outputs from ``rows[0]`` to ``rows[1]`` of a matrix ``[outputs, inputs]`` that is quantized. A format of
        4-bit floating-point numbers gives them dequantized, ``[rows, inputs]`` float32.

        Raises ``PenstockError`` (``invalid``) where its tensors are missing, damaged, or of other shapes or kinds.
        """
        ...


def read_tensor(
    source: TensorSource,
    name: str,
    *shape: int,
    dtypes: Sequence[torch.dtype],
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """A tensor as it is stored. Raises ``PenstockError`` (``invalid``) where it is of none of these dtypes, and as
    ``TensorSource.read`` does."""
    tensor = source.read(name, *shape, rows=rows, as_stored=True)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise invalid("model", f"tensor {name} is of {tensor.dtype}, and its format wants {wanted}")
    return tensor


def num_groups(inputs: int, group_size: int) -> int:
    """Groups of a row; a group size of 0 is the whole row."""
    return -(-inputs // group_size) if group_size else 1
