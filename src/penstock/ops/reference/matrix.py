"""Matrices in their formats: packing, products, rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.quantization import MAX_FP8, UNQUANTIZED, Format

from ..activations import activation_and_mul
from ..hadamard import hadamard
from ..quantized_weight import QuantizedWeight
from ..scale_search import MIN_MAGNITUDE, search_integer_scales, search_scales
from .logits import apply_bitmask

LAYOUT = "reference-3"


def supports(format: Format, dtype: torch.dtype) -> bool:
    """Whether ``pack_quantized`` takes weights of this format for products in this dtype."""
    return format.bits == 8 if format.floating else not format.integer_scales


@dataclass(frozen=True)
class Matrix:
    """A matrix ``[out, in]``, dequantized where it was quantized, and a bias ``[out]`` or none."""

    weight: Tensor
    """In ``dtype``; float32 where the format quantizes, and rotated where it rotates."""
    bias: Tensor | None
    dtype: torch.dtype
    format: Format


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Matrix:
    """Pack a matrix for this backend's products.

    Args:
        parts: matrices ``[rows, in]`` of one dtype, which are stacked to ``[out, in]``.
        bias: ``[out]``, added to each product.
        format: to quantize the weights to.
    """
    weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if not format.bits:
        return Matrix(weight, bias, weight.dtype, format)
    bias, block = None if bias is None else bias.float(), format.rotation_block(weight.shape[1])
    rotated = hadamard(weight.float(), block) / block
    return Matrix(_quantize_dequantize(rotated, format), bias, weight.dtype, format)


def pack_quantized(parts: Sequence[QuantizedWeight], dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """Pack quantized weights that a checkpoint has, as they are.

    Args:
        parts: of one format, which the backend ``supports``, and one order of inputs; they are stacked to
            ``[out, in]``.
        dtype: of products.
        bias: ``[out]``, added to each product.
    """
    weight = torch.cat([part.dequantize_rotated() for part in parts])
    return Matrix(weight, None if bias is None else bias.float(), dtype, parts[0].format)


def packed_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """The tensors of a packed matrix without its bias, for ``from_packed``; empty where packing changes nothing."""
    return {"weight": matrix.weight} if matrix.format.bits else {}


def from_packed(
    tensors: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    """Make a matrix of ``packed_tensors``, which the same ``LAYOUT`` wrote."""
    return Matrix(tensors["weight"], None if bias is None else bias.float(), dtype, format)


def _quantize_dequantize(weight: Tensor, format: Format) -> Tensor:
    """Round to integers or 8-bit floating-point numbers, times scales; float32."""
    if format.floating:
        return _round_fp8(weight, format.rows_per_scale, format.group_size)
    if format.integer_scales:
        return _round_by_integer_scales(weight, format.group_size)
    groups = weight.split(format.group_size or weight.shape[1], 1)
    if len(groups) > 1:
        return torch.cat([_quantize_dequantize(group, replace(format, group_size=0)) for group in groups], 1)
    maximum = weight.abs().amax(1, keepdim=True)
    scale = search_scales(weight)[:, None] if format.bits == 4 else maximum / 127
    scale = torch.where(maximum > MIN_MAGNITUDE, scale, maximum * 0)
    inverse = torch.where(maximum > MIN_MAGNITUDE, 1 / scale, 0)
    lowest, highest = (-8, 7) if format.bits == 4 else (-127, 127)
    return (weight * inverse).round().clamp(lowest, highest) * scale


def _round_by_integer_scales(weight: Tensor, group_size: int) -> Tensor:
    """Round to 4-bit integers times integer scales of groups times scales of outputs; float32."""
    inputs = weight.shape[1]
    groups = F.pad(weight, (0, -inputs % group_size)).unflatten(1, (-1, group_size))
    integers, scales = search_integer_scales(groups)
    step = (integers * scales[:, None])[..., None]
    rounded = (groups * torch.where(step != 0, 1 / step, 0)).round().clamp(-8, 7) * integers[..., None]
    dequantized: Tensor = (rounded * scales[:, None, None]).flatten(1)[:, :inputs]
    return dequantized


def _round_int8(x: Tensor) -> Tensor:
    """Rows rounded to 8-bit integers times a scale."""
    maximum = x.abs().amax(1, keepdim=True)
    inverse = torch.full_like(maximum, 127) / maximum  # a Python number over a tensor would be rounded twice
    return (x * torch.where(maximum > MIN_MAGNITUDE, inverse, 0)).round() * (maximum / 127)


def _round_fp8(x: Tensor, rows: int = 1, columns: int = 0) -> Tensor:
    """Round to 8-bit floating-point numbers (e4m3) times a scale for each so many rows and columns, 0 being all."""
    (height, width), rows, columns = x.shape, rows or len(x), columns or x.shape[1]
    blocks = F.pad(x, (0, -width % columns, 0, -height % rows)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    maximum = blocks.abs().amax((1, 3), keepdim=True)
    scale = maximum / MAX_FP8
    inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, MAX_FP8) / maximum, 0)
    rounded: Tensor = (blocks * inverse).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(2).flatten(0, 1)[:height, :width]


def linear(x: Tensor, matrix: Matrix, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
    """``[tokens, in]`` to ``[tokens, out]``, in ``x``'s dtype or, with ``out_float32``, in float32.

    Where the format quantizes activations, each row, or each group of a row, is divided by its largest magnitude over
    127 and rounded; or each row, or row and group, to 8-bit floating-point numbers. Where it rotates, rows are rotated
    first; those that are not quantized then are rounded to their dtype again.

    Args:
        out: where to write the result, which is returned; its rows are contiguous, and may lie apart. This holds for
            every op with an ``out``.
    """
    if not matrix.format.bits:
        product = F.linear(x, matrix.weight, matrix.bias)
        return write(product.float() if out_float32 else product, out)
    given = hadamard(x.float(), matrix.format.rotation_block(x.shape[1]))
    if not matrix.format.activation_bits:
        given = given.to(x.dtype).float()
    if matrix.format.floating and not matrix.format.is_mxfp4:
        given = _round_fp8(given, columns=matrix.format.group_size)
    elif matrix.format.activation_bits:
        size = matrix.format.group_size if matrix.format.activation_groups else given.shape[1]
        given = torch.cat([_round_int8(group) for group in given.split(size, 1)], 1)
    product = F.linear(given, matrix.weight, matrix.bias)
    return write(product if out_float32 else product.to(x.dtype), out)


def write(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def linear_activation_and_mul(x: Tensor, matrix: Matrix, function: str, out: Tensor | None = None) -> Tensor:
    """``[tokens, in]`` to ``[tokens, out / 2]``: ``activation_and_mul`` of the product."""
    return activation_and_mul(linear(x, matrix), function, out)


def argmax(x: Tensor, matrix: Matrix, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Index of the largest output of ``linear``, the lowest of equal ones, and that output: ``[tokens, in]`` to
    ``[tokens]`` int64 and ``[tokens]`` float32.

    Args:
        bitmask: ``[tokens, ceil(outputs / 32)]`` int32, a bit for each output that may be chosen, the lowest bit
            first. Where none is set for a token, the output is minus infinity.
    """
    logits = linear(x, matrix, out_float32=True)
    largest, index = (logits if bitmask is None else apply_bitmask(logits, bitmask)).max(-1)
    return index, largest


def embedding(token_ids: Tensor, matrix: Matrix, first: int = 0, out: Tensor | None = None) -> Tensor:
    """Rows ``token_ids`` (``[tokens]`` int64) of a matrix ``[vocabulary, hidden]``: ``[tokens, hidden]``.

    Args:
        first: token id of the matrix's first row. Rows of ``out`` whose token id is of none of its rows are not
            written.
    """
    if out is None:
        return _rows(matrix, token_ids - first)
    own = (token_ids >= first) & (token_ids < first + len(matrix.weight))
    out[own] = _rows(matrix, token_ids[own] - first)
    return out


def _rows(matrix: Matrix, numbers: Tensor) -> Tensor:
    rows = matrix.weight[numbers]
    if matrix.format.rotation:
        rows = hadamard(rows, matrix.format.rotation_block(rows.shape[1]))
    return rows.to(matrix.dtype)
