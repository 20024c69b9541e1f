"""Zero padding of attention heads to a supported size."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.model_config import PADDED_TO
from penstock.core import Code, PenstockError
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.layers import Weights
from penstock.ops import QuantizedWeight

OUTPUTS, INPUTS = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
"""Modules whose outputs are heads, and modules whose inputs are heads."""


class PaddedHeads:
    """``layers.Weights`` with zero-padded heads.

    Zeros in queries and keys do not change attention scores. Zeros in values add outputs that are multiplied by the
    zeros in ``o_proj``.

    Args:
        head_dim: elements per head in the checkpoint.
        padded: elements per head in the model.
    """

    def __init__(self, base: Weights, head_dim: int, padded: int) -> None:
        self._base = base
        self._head_dim = head_dim
        self._padded = padded

    @property
    def version(self) -> str:
        return self._base.version

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        module = name.split(".")[-2] if "." in name else ""
        if module in OUTPUTS:
            stored = (self._stored(shape[0]), *shape[1:])
            stored_rows = (self._stored(rows[0]), self._stored(rows[1])) if rows else None
            tensor = self._base.read(name, *stored, rows=stored_rows, as_stored=as_stored)
            return self._pad(tensor.unflatten(0, (-1, self._head_dim)), 1).flatten(0, 1)
        if module in INPUTS and len(shape) == 2:
            tensor = self._base.read(name, shape[0], self._stored(shape[1]), rows=rows, as_stored=as_stored)
            return self._pad(tensor.unflatten(1, (-1, self._head_dim)), 2).flatten(1, 2)
        return self._base.read(name, *shape, rows=rows, as_stored=as_stored)

    def has(self, name: str) -> bool:
        return self._base.has(name)

    def format_of(self, name: str) -> Format:
        format = self._base.format_of(name)
        if format != UNQUANTIZED and name.rpartition(".")[2] in OUTPUTS + INPUTS:
            message = f"head_dim is {self._head_dim}; with quantized weights it must be a multiple of {PADDED_TO}"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        return format

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        return self._base.read_quantized(name, outputs, inputs, rows)

    def _stored(self, size: int) -> int:
        """Convert a number of padded elements in the model to the number of elements in the checkpoint."""
        return size // self._padded * self._head_dim

    def _pad(self, heads: Tensor, dim: int) -> Tensor:
        """Append zeros to a dimension, up to the padded size."""
        shape = list(heads.shape)
        shape[dim] = self._padded - self._head_dim
        return torch.cat((heads, heads.new_zeros(shape)), dim)
