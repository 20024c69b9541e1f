"""Matrices packed for the CPU kernels, and products with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.core import Code, PenstockError
from penstock.core.quantization import UNQUANTIZED, Format

from .. import _kernels, pages
from ..quantized_weight import QuantizedWeight
from ..scale_search import fits_half
from .dtypes import DTYPE_CODES, dtype_code
from .elementwise import ACTIVATION_CODES, activation_and_mul
from .graph import contiguous, empty

LAYOUT = "cpu-3"
"""Version of the packed layout, which is the same for all instruction sets."""
FORMAT_CODES = {(0, 0): 0, (8, 8): 1, (4, 8): 2, (8, 0): 3, (4, 0): 4}
"""Number of a format in the kernels, by ``bits`` and ``activation_bits``."""
MXFP4_CODE = 5
"""Number of mxfp4 in the kernels."""
GROUP_TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2}
"""Number in the kernels of each dtype of scales and offsets."""


@dataclass(eq=False)
class Matrix:
    """A matrix ``[out, in]`` in panels of 64 outputs, with an optional bias ``[out]``."""

    native: Any
    """``_kernels.Matrix``."""
    tensors: dict[str, Tensor]
    """Tensors that own the memory for ``native``: ``values``, and depending on the matrix ``scales``, ``offsets``,
    ``output_scales``, ``order`` and ``bias``."""
    outputs: int
    """Number of rows."""
    inputs: int
    """Number of columns."""
    dtype: torch.dtype
    """Dtype of products and embeddings, for all formats."""
    format: Format
    sketch: Any = None
    """State of ``argmax``: None before the first call, False if there is no sketch."""


@dataclass(frozen=True)
class QuantizedRows:
    """Activations in 8 bits, ``[tokens, in]``: ``values * scales[:, None]``."""

    values: Tensor
    """``[tokens, in]`` int8, with ``in`` padded to a multiple of 8."""
    scales: Tensor
    """``[tokens]`` float32; ``[tokens, groups]`` with ``activation_groups``."""
    sums: Tensor
    """``[tokens, groups]`` int32: sum of each group's values. With integer scales ``[tokens, groups + 1]``: the last
    entry is the sum of the row."""


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Matrix:
    """See ``reference.pack``. Parts are not copied if all except the last one have a multiple of 64 rows."""
    if any(part.shape[0] % _kernels.PANEL for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    dtype, inputs = parts[0].dtype, parts[0].shape[1]
    outputs = sum(part.shape[0] for part in parts)
    matrix = make_matrix(new_tensors(inputs, outputs, dtype, format), inputs, outputs, dtype, bias, format)
    first = 0
    for part in parts:
        part = part.contiguous()  # the variable keeps the memory alive until it is packed
        _kernels.pack(part.data_ptr(), matrix.native, first, part.shape[0])
        first += part.shape[0]
    if format.bits == 4 and not format.integer_scales and fits_half(matrix.tensors["scales"]):
        tensors = packed_tensors(matrix) | {"scales": matrix.tensors["scales"].half()}
        return make_matrix(tensors, inputs, outputs, dtype, bias, format)
    return matrix


def pack_quantized(parts: Sequence[QuantizedWeight], dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """See ``reference.pack_quantized``."""
    values, format, order = torch.cat([part.values for part in parts]), parts[0].format, parts[0].order
    outputs, inputs = values.shape
    tensors = new_tensors(inputs, outputs, dtype, format)
    tensors["scales"] = _pack_groups([part.scales for part in parts])
    if format.asymmetric:
        tensors["offsets"] = _pack_groups([part.offsets for part in parts if part.offsets is not None])
    if order is not None:
        tensors["order"] = order.to(torch.int32)
    matrix = make_matrix(tensors, inputs, outputs, dtype, bias, format)
    _kernels.pack_integers(values.data_ptr(), matrix.native, 0, outputs)
    return matrix


def _pack_groups(parts: Sequence[Tensor]) -> Tensor:
    """Stack scales or offsets ``[out, groups]`` and reorder them to ``[panels, groups, 64]``, flattened and padded with
    zeros; in float16 if all values are representable as zero or normal numbers."""
    groups = torch.cat(list(parts))
    groups = groups.half() if fits_half(groups) else groups
    padded = pad(groups, (0, 0, 0, -len(groups) % _kernels.PANEL))
    return padded.view(-1, _kernels.PANEL, groups.shape[1]).transpose(1, 2).flatten()


def supports(format: Format, dtype: torch.dtype) -> bool:
    """See ``reference.supports``."""
    dtypes = DTYPE_CODES if format.activation_bits else (torch.bfloat16,)
    if format.integer_scales or (format.floating and (not format.is_mxfp4 or format.activation_bits)):
        return False
    return bool(format.bits) and dtype in dtypes


def packed_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """See ``reference.packed_tensors``."""
    return {name: tensor for name, tensor in matrix.tensors.items() if name != "bias"}


def from_packed(
    tensors: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    """See ``reference.from_packed``. Raises ``PenstockError`` (``internal``) for tensors of a wrong size or dtype."""
    return make_matrix(tensors, inputs, outputs, dtype, bias, format)


def packed_sizes(inputs: int, outputs: int, dtype: torch.dtype, format: Format) -> dict[str, tuple[int, torch.dtype]]:
    """Return number of elements and dtype of each packed tensor except ``order``. Scales and offsets may also be
    float16.

    Raises ``PenstockError`` (``unsupported``) for formats and dtypes without kernels.
    """
    if format.floating and not format.is_mxfp4:
        raise PenstockError(Code.UNSUPPORTED, "fp8 requires an NVIDIA GPU of compute capability 8.9", "quantization")
    if format.bits and not format.activation_bits and dtype is not torch.bfloat16:
        message = f"weight-only quantization requires bfloat16; dtype is {str(dtype).removeprefix('torch.')}"
        raise PenstockError(Code.UNSUPPORTED, message, "quantization")
    panels = -(-outputs // _kernels.PANEL)
    sizes = {"values": (panels * _native({}, inputs, outputs, dtype, format).panel_bytes, torch.uint8)}
    if format.bits:
        kind = torch.int8 if format.integer_scales else torch.float32
        sizes["scales"] = panels * -(-inputs // (format.group_size or inputs)) * _kernels.PANEL, kind
    if format.integer_scales:
        sizes["output_scales"] = panels * _kernels.PANEL, torch.float32
    if format.asymmetric:
        sizes["offsets"] = sizes["scales"]
    return sizes


def new_tensors(inputs: int, outputs: int, dtype: torch.dtype, format: Format) -> dict[str, Tensor]:
    """Allocate zeroed packed tensors, for the caller to fill."""
    return {
        name: pages.zeros(size, huge=True) if name == "values" else torch.zeros(size, dtype=kind)
        for name, (size, kind) in packed_sizes(inputs, outputs, dtype, format).items()
    }


def make_matrix(
    packed: Mapping[str, Tensor],
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    bias: Tensor | None,
    format: Format,
) -> Matrix:
    """Create a matrix from packed tensors. Raises ``PenstockError`` (``internal``) for tensors of a wrong size or
    dtype, since kernels do not check bounds."""
    expected = packed_sizes(inputs, outputs, dtype, format)
    if (order := packed.get("order")) is not None:
        expected["order"] = inputs, torch.int32
    for name in {"scales", "offsets"} & packed.keys() & expected.keys():
        if packed[name].dtype is torch.float16 and not format.integer_scales:
            expected[name] = expected[name][0], torch.float16
    if (found := {name: (tensor.numel(), tensor.dtype) for name, tensor in packed.items()}) != expected:
        message = f"packed weights have an unexpected size or dtype: {found}, not {expected}"
        raise PenstockError(Code.INTERNAL, message)
    if order is not None and not torch.equal(order.sort().values, torch.arange(inputs)):
        raise PenstockError(Code.INTERNAL, "the order of packed weights is not a permutation of their inputs")
    if order is not None:  # experts quantize activations before the permutation, so that groups would not match
        format = replace(format, activation_groups=False)
    tensors = dict(packed) | ({} if bias is None else {"bias": bias.float()})
    return Matrix(_native(tensors, inputs, outputs, dtype, format), tensors, outputs, inputs, dtype, format)


def without_activation_groups(matrix: Matrix) -> Matrix:
    """Return the matrix with one activation scale per row."""
    format, bias = replace(matrix.format, activation_groups=False), matrix.tensors.get("bias")
    return make_matrix(packed_tensors(matrix), matrix.inputs, matrix.outputs, matrix.dtype, bias, format)


def _native(tensors: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, format: Format) -> Any:
    """Create the ``_kernels.Matrix`` over tensors; missing tensors have address 0."""

    def address(name: str) -> int:
        return tensors[name].data_ptr() if name in tensors else 0

    def group_type(name: str) -> int:
        return GROUP_TYPES[tensors[name].dtype] if name in tensors else 0

    return _kernels.Matrix(
        address("values"),
        address("scales"),
        group_type("scales"),
        address("offsets"),
        group_type("offsets"),
        address("output_scales"),
        address("bias"),
        address("order"),
        inputs,
        outputs,
        format.group_size or inputs,
        format.rotation_block(inputs),
        format.activation_groups and format.group_size < inputs,
        MXFP4_CODE if format.is_mxfp4 else FORMAT_CODES[format.bits, format.activation_bits],
        dtype_code(dtype),
    )


def quantize(x: Tensor, format: Format) -> QuantizedRows:
    """Quantize rows ``[tokens, in]`` or ``[tokens, rows, in]`` to 8 bits, with one scale per row or group: the largest
    magnitude becomes 127. Rows are rotated before if the format has a rotation."""
    x = contiguous(x)
    (tokens, *more, inputs), rows = x.shape, prod(x.shape[:-1])
    padded, group_size = -(-inputs // 8) * 8, format.group_size or inputs
    groups = -(-inputs // group_size)
    out = QuantizedRows(
        empty((rows, padded), torch.int8),
        empty((rows, groups) if format.activation_groups else (rows,), torch.float32),
        empty((rows, groups + format.integer_scales), torch.int32),
    )
    _kernels.quantize(
        x.data_ptr(),
        out.values.data_ptr(),
        out.scales.data_ptr(),
        out.sums.data_ptr(),
        tokens,
        prod(more),
        inputs,
        padded,
        group_size,
        format.rotation_block(inputs),
        format.activation_groups,
        format.integer_scales,
        DTYPE_CODES[x.dtype],
    )
    return out


def rotate(x: Tensor, block: int) -> Tensor:
    """Rotate rows ``[tokens, in]`` or ``[tokens, rows, in]`` in blocks of ``block`` inputs. The dtype is unchanged."""
    x, out, (tokens, *more, inputs) = contiguous(x), empty(x.shape, x.dtype), x.shape
    code = DTYPE_CODES[x.dtype]
    _kernels.rotate(x.data_ptr(), out.data_ptr(), tokens, prod(more), inputs, block, code)
    return out


def sum_groups(x: Tensor, group_size: int = 0) -> Tensor:
    """Sum each group of inputs of rows ``[tokens, in]`` or ``[tokens, rows, in]``: ``[..., groups]`` float32.

    Args:
        group_size: number of inputs per group; 0: one group per row.
    """
    tokens, *more, inputs = x.shape
    group_size = group_size or inputs
    sums = empty((tokens, *more, -(-inputs // group_size)), torch.float32)
    code = DTYPE_CODES[x.dtype]
    _kernels.sum_groups(x.data_ptr(), sums.data_ptr(), tokens, prod(more), inputs, group_size, code)
    return sums


def product_input(x: Tensor, matrix: Matrix) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """Permute, rotate and quantize the input of a product, as the matrix requires.

    Returns:
        The tensors, which the caller must keep alive until the kernel returns, and the kernel's arguments: the
        addresses of values, scales and sums (0 for tensors that the format does not have).
    """
    x = contiguous(x)
    if "order" in matrix.tensors:
        unpermuted, x = x, empty(x.shape, x.dtype)
        _kernels.permute(unpermuted.data_ptr(), matrix.native, x.data_ptr(), x.shape[0], DTYPE_CODES[x.dtype])
    return unpermuted_input(x, matrix)


def unpermuted_input(x: Tensor, matrix: Matrix) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """``product_input`` without the permutation, for ``[tokens, in]`` or ``[tokens, rows, in]``."""
    format = matrix.format
    if format.activation_bits:
        rows = quantize(x, format)
        tensors = rows.values, rows.scales, rows.sums
        return tensors, (rows.values.data_ptr(), rows.scales.data_ptr(), rows.sums.data_ptr())
    if (block := format.rotation_block(x.shape[-1])) > 1:
        x = rotate(x, block)
    if format.asymmetric:
        sums = sum_groups(x, format.group_size)
        return (x, sums), (x.data_ptr(), 0, sums.data_ptr())
    return (x,), (x.data_ptr(), 0, 0)


def linear(x: Tensor, matrix: Matrix, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
    """See ``reference.linear``."""
    dtype = torch.float32 if out_float32 else x.dtype
    out = empty((x.shape[0], matrix.outputs), dtype) if out is None else out
    _tensors, addresses = product_input(x, matrix)
    _kernels.linear(*addresses, matrix.native, out.data_ptr(), out.stride(0), x.shape[0], DTYPE_CODES[dtype])
    return out


def linear_activation_and_mul(x: Tensor, matrix: Matrix, function: str, out: Tensor | None = None) -> Tensor:
    """See ``reference.linear_activation_and_mul``. Calls a single kernel if each half has a multiple of 64 outputs."""
    size = matrix.outputs // 2
    if size % _kernels.PANEL:
        return activation_and_mul(linear(x, matrix), function, out)
    out = empty((x.shape[0], size), x.dtype) if out is None else out
    _tensors, addresses = product_input(x, matrix)
    numbers = out.stride(0), x.shape[0], DTYPE_CODES[x.dtype], ACTIVATION_CODES[function]
    _kernels.linear_activation_and_mul(*addresses, matrix.native, out.data_ptr(), *numbers)
    return out


def embedding(token_ids: Tensor, matrix: Matrix, first: int = 0, out: Tensor | None = None) -> Tensor:
    """See ``reference.embedding``."""
    rows = token_ids.shape[0]
    out = empty((rows, matrix.inputs), matrix.dtype) if out is None else out
    _kernels.embedding(token_ids.data_ptr(), matrix.native, out.data_ptr(), first, rows)
    return out
