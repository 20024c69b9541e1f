"""Interfaces of checkpoint formats, and of the tensor sources that they read."""

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
    """Tensors of a checkpoint by name; ``layers.Weights`` documents the methods."""

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor: ...
    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ``PenstockError`` (``invalid``) if the checkpoint lacks the tensor."""
        ...


class StackedSource:
    """A ``TensorSource`` that reads tensors ``[experts, rows, ...]`` as ``[experts * rows, ...]``: the experts of a
    layer as one matrix, of which each expert has some outputs."""

    def __init__(self, base: TensorSource) -> None:
        self._base = base

    def has(self, name: str) -> bool:
        return self._base.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._base.shape(name)
        return (shape[0] * shape[1], *shape[2:]) if len(shape) == 3 else shape

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        stored = self._base.shape(name)
        if len(stored) != 3 or self.shape(name) != shape:
            return self._base.read(name, *shape, rows=rows, as_stored=as_stored)
        first, end = rows or (0, shape[0])
        experts = first // stored[1], -(-end // stored[1])
        read = self._base.read(name, *stored, rows=experts, as_stored=as_stored).flatten(0, 1)
        return read[first - experts[0] * stored[1] :][: end - first]


class CheckpointFormat(Protocol):
    """Reader of the matrices of a quantized checkpoint. Implementations take the ``quantization_config``."""

    notes: Sequence[str]
    """Log messages about settings of the checkpoint that are not applied."""

    def format_of(self, source: TensorSource, name: str) -> Format:
        """Return a matrix's format; ``UNQUANTIZED`` if it is stored as a floating-point tensor ``<name>.weight``. Uses
        only names and shapes of tensors."""
        ...

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """Return the number of outputs and inputs of a quantized matrix. Raises ``PenstockError`` (``invalid``) if a
        tensor of the matrix is missing."""
        ...

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight | Tensor:
        """Read outputs ``rows[0]`` to ``rows[1]`` (exclusive) of a quantized matrix ``[outputs, inputs]``. Weights in
        formats without kernels (nf4, fp4) are dequantized, ``[rows, inputs]`` float32.

        Raises ``PenstockError`` (``invalid``) if tensors are missing, damaged, or have an unexpected shape or dtype.
        """
        ...


def read_tensor(
    source: TensorSource,
    name: str,
    *shape: int,
    dtypes: Sequence[torch.dtype],
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Read a tensor in its stored dtype. Raises ``PenstockError`` (``invalid``) if the dtype is not in ``dtypes``, or
    the tensor is missing, damaged, or has another shape."""
    tensor = source.read(name, *shape, rows=rows, as_stored=True)
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise invalid("model", f"tensor {name} has dtype {tensor.dtype}; its format requires {expected}")
    return tensor


def num_groups(inputs: int, group_size: int) -> int:
    """Number of groups per row. Group size 0 means one group for the whole row."""
    return -(-inputs // group_size) if group_size else 1
