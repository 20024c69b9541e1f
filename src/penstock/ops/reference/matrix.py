"""Weight matrices: packing, products, and row lookup (embedding)."""

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
"""Version of the packed layout."""


def supports(format: Format, dtype: torch.dtype) -> bool:
    """True if ``pack_quantized`` accepts weights of this format for products in this dtype."""
    return format.bits == 8 if format.floating else not format.integer_scales


@dataclass(frozen=True)
class Matrix:
    """A matrix ``[out, in]``, dequantized if it was quantized, and an optional bias ``[out]``."""

    weight: Tensor
    """The weight: in ``dtype`` if unquantized; otherwise in float32, and rotated if the format has a rotation."""
    bias: Tensor | None
    dtype: torch.dtype
    """Dtype of products and embeddings."""
    format: Format


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Matrix:
    """Pack a matrix for the products of this backend.

    Args:
        parts: matrices ``[rows, in]`` of one dtype, which are stacked to ``[out, in]``.
        bias: ``[out]``, added to each product.
        format: format of the packed weights.
    """
    weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if not format.bits:
        return Matrix(weight, bias, weight.dtype, format)
    bias, block = None if bias is None else bias.float(), format.rotation_block(weight.shape[1])
    rotated = hadamard(weight.float(), block) / block
    return Matrix(_quantize_dequantize(rotated, format), bias, weight.dtype, format)


def pack_quantized(parts: Sequence[QuantizedWeight], dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """Pack the quantized weights of a checkpoint without requantizing them.

    Args:
        parts: matrices of one format, which the backend ``supports``, and one order of inputs; they are stacked to
            ``[out, in]``.
        dtype: dtype of products.
        bias: ``[out]``, added to each product.
    """
    weight = torch.cat([part.dequantize_rotated() for part in parts])
    return Matrix(weight, None if bias is None else bias.float(), dtype, parts[0].format)


def packed_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """Return the tensors of a packed matrix, except its bias, for ``from_packed``; empty if packing is a no-op."""
    return {"weight": matrix.weight} if matrix.format.bits else {}


def from_packed(
    tensors: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    """Create a matrix from ``packed_tensors`` with the same ``LAYOUT``."""
    return Matrix(tensors["weight"], None if bias is None else bias.float(), dtype, format)


def _quantize_dequantize(weight: Tensor, format: Format) -> Tensor:
    """Quantize weights to integers or 8-bit floating-point numbers with scales. Returns the dequantized weights in
    float32."""
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
    """Quantize weights to 4-bit integers with an integer scale per group and a scale per output. Returns the
    dequantized weights in float32."""
    inputs = weight.shape[1]
    groups = F.pad(weight, (0, -inputs % group_size)).unflatten(1, (-1, group_size))
    integers, scales = search_integer_scales(groups)
    step = (integers * scales[:, None])[..., None]
    rounded = (groups * torch.where(step != 0, 1 / step, 0)).round().clamp(-8, 7) * integers[..., None]
    dequantized: Tensor = (rounded * scales[:, None, None]).flatten(1)[:, :inputs]
    return dequantized


def _round_int8(x: Tensor) -> Tensor:
    """Quantize rows to 8-bit integers with a scale per row. Returns the dequantized rows."""
    maximum = x.abs().amax(1, keepdim=True)
    inverse = torch.full_like(maximum, 127) / maximum  # `127 / maximum` would round twice
    return (x * torch.where(maximum > MIN_MAGNITUDE, inverse, 0)).round() * (maximum / 127)


def _round_fp8(x: Tensor, rows: int = 1, columns: int = 0) -> Tensor:
    """Quantize to e4m3 with a scale per block of ``rows`` rows and ``columns`` columns (0: all). Returns the
    dequantized numbers."""
    (height, width), rows, columns = x.shape, rows or len(x), columns or x.shape[1]
    blocks = F.pad(x, (0, -width % columns, 0, -height % rows)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    maximum = blocks.abs().amax((1, 3), keepdim=True)
    scale = maximum / MAX_FP8
    inverse = torch.where(maximum > MIN_MAGNITUDE, torch.full_like(maximum, MAX_FP8) / maximum, 0)
    rounded: Tensor = (blocks * inverse).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(2).flatten(0, 1)[:height, :width]


def linear(x: Tensor, matrix: Matrix, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
    """Multiply ``[tokens, in]``; returns ``[tokens, out]``, in ``x``'s dtype or, with ``out_float32``, in float32.

    If the format has a rotation, rows are rotated before, and rounded to their dtype if they are not quantized. If the
    format quantizes activations, each row (or each group of a row) is divided by its scale and rounded to 8-bit
    integers or to e4m3. The scale for integers is the largest magnitude divided by 127.

    Args:
        out: memory for the result, which is returned; None: allocate it. Each row must be contiguous; rows may be
            strided. The same is true for ``out`` of all ops.
    """
    if not matrix.format.bits:
        product = F.linear(x, matrix.weight, matrix.bias)
        return write(product.float() if out_float32 else product, out)
    inputs = hadamard(x.float(), matrix.format.rotation_block(x.shape[1]))
    if not matrix.format.activation_bits:
        inputs = inputs.to(x.dtype).float()
    if matrix.format.floating and not matrix.format.is_mxfp4:
        inputs = _round_fp8(inputs, columns=matrix.format.group_size)
    elif matrix.format.activation_bits:
        size = matrix.format.group_size if matrix.format.activation_groups else inputs.shape[1]
        inputs = torch.cat([_round_int8(group) for group in inputs.split(size, 1)], 1)
    product = F.linear(inputs, matrix.weight, matrix.bias)
    return write(product if out_float32 else product.to(x.dtype), out)


def write(result: Tensor, out: Tensor | None) -> Tensor:
    """Copy a result to ``out`` unless it is None. Returns the tensor with the result."""
    return result if out is None else out.copy_(result)


def linear_activation_and_mul(x: Tensor, matrix: Matrix, function: str, out: Tensor | None = None) -> Tensor:
    """Multiply ``[tokens, in]``, then apply ``activation_and_mul``; returns ``[tokens, out / 2]``."""
    return activation_and_mul(linear(x, matrix), function, out)


def argmax(x: Tensor, matrix: Matrix, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the index of the largest output of ``linear`` (the lowest index in a tie), ``[tokens]`` int64, and the
    largest output, ``[tokens]`` float32.

    Args:
        x: ``[tokens, in]``.
        bitmask: ``[tokens, ceil(outputs / 32)]`` int32 with a bit set for each allowed output, the lowest bit first. If
            no bit of a token is set, its output is minus infinity.
    """
    logits = linear(x, matrix, out_float32=True)
    largest, index = (logits if bitmask is None else apply_bitmask(logits, bitmask)).max(-1)
    return index, largest


def embedding(token_ids: Tensor, matrix: Matrix, first: int = 0, out: Tensor | None = None) -> Tensor:
    """Look up rows of a matrix ``[vocabulary, hidden]``; returns ``[tokens, hidden]``.

    Args:
        token_ids: ``[tokens]`` int64.
        first: token id of the matrix's first row. Rows of ``out`` for tokens without a row in the matrix are not
            written.
    """
    if out is None:
        return _rows(matrix, token_ids - first)
    is_local = (token_ids >= first) & (token_ids < first + len(matrix.weight))
    out[is_local] = _rows(matrix, token_ids[is_local] - first)
    return out


def _rows(matrix: Matrix, indices: Tensor) -> Tensor:
    """Select rows of a matrix, unrotated."""
    rows = matrix.weight[indices]
    if matrix.format.rotation:
        rows = hadamard(rows, matrix.format.rotation_block(rows.shape[1]))
    return rows.to(matrix.dtype)
