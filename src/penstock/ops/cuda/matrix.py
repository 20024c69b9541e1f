"""Matrices packed for the CUDA kernels, and the products with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.quantization import UNQUANTIZED, Format

from .kernels import matrix as kernels
from .launch import launch

LAYOUT = "cuda-1"
"""Version of the packed layout."""


@dataclass(eq=False)
class Matrix:
    """A matrix ``[out, in]`` and a bias ``[out]`` or none."""

    tensors: dict[str, Tensor]
    bias: Tensor | None
    outputs: int
    inputs: int
    dtype: torch.dtype
    """Dtype of products and embeddings, whatever the format."""
    format: Format


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Matrix:
    """As ``reference.pack``."""
    weight = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).contiguous()
    bias = None if bias is None else bias.float()
    return Matrix({"values": weight}, bias, weight.shape[0], weight.shape[1], weight.dtype, format)


def embedding(token_ids: Tensor, matrix: Matrix, first: int = 0, out: Tensor | None = None) -> Tensor:
    """As ``reference.embedding``."""
    tokens = token_ids.shape[0]
    weight = matrix.tensors["values"]
    out = weight.new_empty((tokens, matrix.inputs)) if out is None else out
    grid = tokens, -(-matrix.inputs // 1024)
    arguments = token_ids, weight, out, first, matrix.outputs, matrix.inputs, out.stride(0)
    launch(kernels.gather_rows, grid, *arguments, BLOCK=1024)
    return out
