"""Matrices packed for the CUDA kernels, and products with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from penstock.core import Code, PenstockError
from penstock.core.quantization import MAX_FP8, UNQUANTIZED, Format

from ..hadamard import hadamard
from ..quantized_weight import QuantizedWeight
from ..scale_search import search_scales
from .elementwise import activation_and_mul
from .kernels import matrix as kernels
from .launch import MIN_FP8, architecture, launch, sm_count
from .tiles import Tile, choose_tile

LAYOUT = "cuda-3"
"""Version of the packed layout."""
PANEL, BLOCK = 64, 128
"""Number of outputs of a panel, and number of inputs of a block of 8-bit weights."""
COLUMNS = 1024
"""Number of inputs of a row that a program copies or rotates."""
CHUNK = 128 * PANEL
"""Number of outputs that are quantized at a time, to limit memory."""
MIN_MAGNITUDE = 1e-30
"""Vectors up to this magnitude are quantized to zeros."""
FLOAT4_STEP = 2.0**14
"""Quotient of a 4-bit floating-point value and the float16 value to which kernels convert its bits."""
FP8 = torch.float8_e4m3fn
NO_BIAS = torch.empty(0)
"""Placeholder for an absent bias, with address 0. Kernels do not read it."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Supported dtypes of products, and Triton's types."""


@dataclass(eq=False)
class Matrix:
    """A matrix ``[out, in]`` and an optional bias ``[out]``."""

    tensors: dict[str, Tensor]
    """``values``; for quantized weights also ``scales``, and optionally ``offsets`` (float32) and ``order`` (``[in]``
    int64).

    Unquantized: ``values`` are ``[out, in]``. 8 bits: ``[panels, blocks, 64, 128]``, with scales ``[panels * 64]``, or
    ``[out / 128, in / 128]`` for blocks. 4 bits: ``[panels, blocks, 64, group_size]``, where a block has two groups of
    inputs, the first in the low halves of its bytes; scales are ``[panels, blocks, 2, 64]``, divided by 16, or for
    mxfp4 bfloat16 and multiplied by ``FLOAT4_STEP``; offsets have the shape of scales. Padding is zero.
    """
    bias: Tensor | None
    """Bias in float32, or None."""
    outputs: int
    """Number of rows."""
    inputs: int
    """Number of columns."""
    dtype: torch.dtype
    """Dtype of products and embeddings, for all formats."""
    format: Format


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Matrix:
    """See ``reference.pack``. An unquantized matrix of one part is not copied."""
    dtype, inputs = parts[0].dtype, parts[0].shape[1]
    outputs, format = sum(len(part) for part in parts), _kernel_format(format)
    _check_supported(format, dtype, parts[0].device)
    if not format.bits:
        weight = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).contiguous()
        return from_packed({"values": weight}, inputs, outputs, dtype, bias, format)
    weight = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    tensors = _new_tensors(inputs, outputs, dtype, format, weight.device)
    whole = weight.abs().amax().float() if not format.rows_per_scale else None
    for first in range(0, outputs, CHUNK):
        _pack_chunk(tensors, weight[first : first + CHUNK].float(), first, format, whole)
    return from_packed(tensors, inputs, outputs, dtype, bias, format)


def _new_tensors(
    inputs: int, outputs: int, dtype: torch.dtype, format: Format, device: torch.device
) -> dict[str, Tensor]:
    """Allocate zeroed packed tensors, for the caller to fill."""
    return {
        name: torch.zeros(shape, dtype=kind, device=device)
        for name, (shape, kind) in packed_shapes(inputs, outputs, dtype, format).items()
    }


def _pack_chunk(tensors: dict[str, Tensor], weight: Tensor, first: int, format: Format, whole: Tensor | None) -> None:
    """Quantize outputs from ``first`` on, and store them in their panels.

    Args:
        whole: largest magnitude of the matrix if it has a single scale; else None.
    """
    outputs, inputs = weight.shape
    blocks = tensors["values"].shape[1]
    size = blocks * (2 * format.group_size if format.bits == 4 else BLOCK)
    rows, columns = (format.rows_per_scale, format.group_size) if format.group_size else (1, size)
    if (block := format.rotation_block(inputs)) > 1:
        weight = hadamard(weight, block) / block
    groups = pad(weight, (0, size - inputs, 0, -outputs % rows)).view(-1, rows, size // columns, columns)
    maximum = groups.abs().amax((1, 3), keepdim=True)
    if whole is not None:
        maximum = whole.expand_as(maximum)
    largest = torch.full_like(maximum, MAX_FP8 if format.floating else 127)
    scale = maximum / largest
    if format.floating:
        quantized = (groups * _inverse(maximum, largest / maximum)).clamp(-MAX_FP8, MAX_FP8).to(FP8).view(torch.int8)
    elif format.bits == 4:
        scale = torch.where(maximum > MIN_MAGNITUDE, search_scales(groups)[..., None], maximum * 0)
        quantized = (groups * _inverse(maximum, 1 / scale)).round().clamp(-8, 7).to(torch.int8)
    else:
        quantized = (groups * _inverse(maximum, 1 / scale)).round().to(torch.int8)
    _put_values(tensors["values"], quantized.view(-1, size)[:outputs], first, format)
    _put_scales(tensors["scales"], scale[:, 0, :, 0], first, format)


def _put_values(values: Tensor, quantized: Tensor, first: int, format: Format) -> None:
    """Store quantized values ``[outputs, inputs]`` in their panels.

    Args:
        first: index of the first output, which must be the first of a panel.
    """
    count, blocks = -(-len(quantized) // PANEL), values.shape[1]
    size = blocks * (2 * format.group_size if format.bits == 4 else BLOCK)
    padded = pad(quantized, (0, size - quantized.shape[1], 0, count * PANEL - len(quantized)))
    if format.bits == 4:
        pairs = padded.view(count, PANEL, blocks, 2, format.group_size)
        padded = (pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)
    values[first // PANEL :][:count] = padded.view(count, PANEL, blocks, -1).transpose(1, 2)


def _put_scales(scales: Tensor, new_scales: Tensor, first: int, format: Format, factor: float = 1 / 16) -> None:
    """Store scales or offsets ``[outputs, groups]`` of the outputs from ``first`` on; for 4-bit formats, multiplied by
    ``factor``."""
    if format.bits == 8:
        start = first // (format.rows_per_scale or 1)
        scales[start : start + len(new_scales)] = new_scales if format.group_size else new_scales[:, 0]
        return
    count, blocks = -(-len(new_scales) // PANEL), scales.shape[1]
    padded = pad(new_scales * factor, (0, 2 * blocks - new_scales.shape[1], 0, count * PANEL - len(new_scales)))
    scales[first // PANEL :][:count] = padded.view(count, PANEL, blocks, 2).permute(0, 2, 3, 1)


def _inverse(maximum: Tensor, inverse: Tensor) -> Tensor:
    """``inverse``, or 0 for groups that are quantized to zeros (``MIN_MAGNITUDE``)."""
    return torch.where(maximum > MIN_MAGNITUDE, inverse, 0)


def packed_shapes(
    inputs: int, outputs: int, dtype: torch.dtype, format: Format
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of packed tensors except ``order``."""
    format = _kernel_format(format)
    panels = -(-outputs // PANEL)
    if not format.bits:
        return {"values": ((outputs, inputs), dtype)}
    scales: tuple[int, ...]
    if format.bits == 4:
        blocks, size = -(-inputs // (2 * format.group_size)), format.group_size
        scales = panels, blocks, 2, PANEL
    else:
        blocks, size = -(-inputs // BLOCK), BLOCK
        scales = (-(-outputs // format.rows_per_scale), blocks) if format.group_size else (panels * PANEL,)
    names = ("scales", "offsets") if format.asymmetric else ("scales",)
    kind = torch.bfloat16 if format.is_mxfp4 else torch.float32
    return {"values": ((panels, blocks, PANEL, size), torch.int8)} | {name: (scales, kind) for name in names}


def _kernel_format(format: Format) -> Format:
    """Format of the kernels for ``format``. Formats with integer scales have no kernels: they are replaced by a format
    with a floating-point scale per 32 inputs."""
    return replace(format, group_size=32, integer_scales=False) if format.integer_scales else format


def _check_supported(format: Format, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``PenstockError`` (``unsupported``) for formats and dtypes without kernels."""
    if dtype not in DTYPES:
        raise PenstockError(Code.UNSUPPORTED, f"the CUDA kernels support bfloat16, float16 and float32, not {dtype}")
    if format.floating and format.bits == 8 and architecture(device).capability < MIN_FP8:
        found = "{}.{}".format(*architecture(device).capability)
        message = f"fp8 requires a GPU of compute capability 8.9 or higher, not {found}"
        raise PenstockError(Code.UNSUPPORTED, message, "quantization")
    if not _has_kernels(format):
        raise PenstockError(Code.UNSUPPORTED, f"no CUDA kernels support {format}", "quantization")


def _has_kernels(format: Format) -> bool:
    """True if the kernels support a format."""
    if format.activation_groups:
        return False
    if format.bits == 4:
        if format.floating:
            return format.is_mxfp4 and not format.activation_bits
        return format.group_size in (32, 64, 128) and not format.integer_scales
    if format.floating:
        one_scale = not format.group_size and format.rows_per_scale in (0, 1)
        return bool(format.activation_bits) and (one_scale or format.group_size == format.rows_per_scale == BLOCK)
    return not format.group_size and not format.asymmetric


def pack_quantized(parts: Sequence[QuantizedWeight], dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """See ``reference.pack_quantized``. A block of outputs with one scale must be within one part."""
    values, format, order = torch.cat([part.values for part in parts]), parts[0].format, parts[0].order
    outputs, inputs = values.shape
    _check_supported(format, dtype, values.device)
    tensors = _new_tensors(inputs, outputs, dtype, format, values.device)
    for first in range(0, outputs, CHUNK):
        _put_values(tensors["values"], values[first : first + CHUNK].view(torch.int8), first, format)
    scales = [part.scales if format.rows_per_scale else part.scales.expand(len(part.values), 1) for part in parts]
    _put_scales(tensors["scales"], torch.cat(scales), 0, format, FLOAT4_STEP if format.is_mxfp4 else 1 / 16)
    if format.asymmetric:
        offsets = torch.cat([part.offsets for part in parts if part.offsets is not None])
        _put_scales(tensors["offsets"], offsets, 0, format, 1.0)
    if order is not None:
        tensors["order"] = order
    return from_packed(tensors, inputs, outputs, dtype, bias, format)


def supports(format: Format, dtype: torch.dtype) -> bool:
    """See ``reference.supports``."""
    return bool(format.bits) and dtype in DTYPES and _has_kernels(format)


def packed_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """See ``reference.packed_tensors``."""
    return dict(matrix.tensors) if matrix.format.bits else {}


def from_packed(
    tensors: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    """See ``reference.from_packed``. Raises ``PenstockError`` (``internal``) for tensors of a wrong shape or dtype."""
    format = _kernel_format(format)
    _check_supported(format, dtype, tensors["values"].device)
    expected = packed_shapes(inputs, outputs, dtype, format)
    if "order" in tensors:
        expected["order"] = (inputs,), torch.int64
    if (found := {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}) != expected:
        message = f"packed weights have an unexpected size or dtype: {found}, not {expected}"
        raise PenstockError(Code.INTERNAL, message)
    return Matrix(dict(tensors), None if bias is None else bias.float(), outputs, inputs, dtype, format)


def quantize(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantize rows ``[tokens, in]`` to 8 bits, padded with zeros to whole blocks. Rows are rotated before if the
    format has a rotation. Returns the values, and scales ``[tokens]``, or ``[blocks, tokens]`` for a format with a
    scale per block."""
    tokens, inputs = x.shape
    padding = max(BLOCK, 2 * format.group_size if format.bits == 4 else 0)
    padded = -(-inputs // padding) * padding
    grouped = bool(format.floating and format.group_size)
    values = x.new_empty((tokens, padded), dtype=FP8 if format.floating else torch.int8)
    scales = x.new_empty((padded // BLOCK, tokens) if grouped else (tokens,), dtype=torch.float32)
    size = 1 << (padded // BLOCK - 1).bit_length()
    arguments = x, values, scales, inputs, padded, x.stride(0)
    launch(
        kernels.quantize_rows,
        (tokens,),
        *arguments,
        MAX=MAX_FP8 if format.floating else 127.0,
        MIN=MIN_MAGNITUDE,
        GROUPED=grouped,
        ROTATION=format.rotation_block(inputs),
        SIZE=size,
        ITEMS=BLOCK,
        num_warps=min(max(size // 8, 1), 16),
    )
    return values, scales


def rotate(x: Tensor, block: int) -> Tensor:
    """Rotate rows ``[tokens, in]`` in blocks of ``block`` inputs. The dtype is unchanged."""
    out = x.new_empty(x.shape)
    arguments = x, out, x.shape[1], x.stride(0)
    launch(kernels.rotate_rows, (len(x), -(-x.shape[1] // COLUMNS)), *arguments, ROTATION=block, COLUMNS=COLUMNS)
    return out


def sum_groups(x: Tensor, groups: int, group_size: int) -> Tensor:
    """Sum each group of inputs of rows ``[tokens, in]``: ``[groups, tokens]`` float32."""
    sums = x.new_empty((groups, len(x)), dtype=torch.float32)
    arguments = x, sums, x.shape[1], groups, x.stride(0)
    launch(kernels.sum_groups, (len(x), -(-groups // 16)), *arguments, SIZE=group_size, GROUPS=16)
    return sums


def use_cublas(enabled: bool) -> None:
    """Enable or disable cuBLAS for unquantized weights. Its order of summation depends on the number of tokens."""
    global _cublas
    _cublas = enabled


_cublas = False
"""Use cuBLAS for unquantized weights."""


def linear(x: Tensor, matrix: Matrix, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
    """See ``reference.linear``."""
    if _cublas and not matrix.format.bits:
        bias = None if matrix.bias is None else matrix.bias.to(x.dtype)
        result = torch.nn.functional.linear(x, matrix.tensors["values"], bias)
        result = result.float() if out_float32 else result
        return result if out is None else out.copy_(result)
    out = x.new_empty((len(x), matrix.outputs), dtype=torch.float32 if out_float32 else x.dtype) if out is None else out
    return product(x, matrix, out)


def linear_activation_and_mul(x: Tensor, matrix: Matrix, function: str, out: Tensor | None = None) -> Tensor:
    """See ``reference.linear_activation_and_mul``. Launches a single kernel."""
    if _cublas and not matrix.format.bits:
        return activation_and_mul(linear(x, matrix), function, out)
    out = x.new_empty((len(x), matrix.outputs // 2)) if out is None else out
    return product(x, matrix, out, gated=function)


@dataclass(frozen=True)
class ExpertAssignments:
    """Assignments of tokens to experts, grouped by expert (``kernels.experts.group_assignments``)."""

    assignments: Tensor
    """``[tiles * tile.bt]`` int32: assignment (``token * top_k + k``) of each row of a tile; -1: padding."""
    tile_experts: Tensor
    """``[tiles]`` int32: expert of each tile; -1: unused."""
    assignments_per_row: int
    """Number of assignments per row of inputs."""
    tile: Tile
    weight_size: int
    """Number of elements of an expert's values."""
    scales_size: int
    """Number of elements of an expert's scales; 0 without scales."""


def product(
    x: Tensor, matrix: Matrix, out: Tensor, gated: str = "", assignments: ExpertAssignments | None = None
) -> Tensor:
    """Multiply rows ``x`` by ``matrix``, write the result to ``out``, and return ``out``.

    Args:
        gated: activation of the first half of the outputs, which is then multiplied by the second half; empty: not
            gated.
        assignments: rows and experts to multiply; ``matrix`` then has the stacked tensors of all experts.
    """
    format, tokens = matrix.format, len(x)
    if tokens == 0:
        return out
    values, scales = matrix.tensors["values"], matrix.tensors.get("scales")
    dtype, x_scales = DTYPES[x.dtype], None
    if "order" in matrix.tensors:
        x = x.index_select(1, matrix.tensors["order"])
    x = x if x.stride(1) == 1 else x.contiguous()
    if format.activation_bits:
        x, x_scales = quantize(x, format)
    elif (block := format.rotation_block(matrix.inputs)) > 1:
        x = rotate(x, block)
    offsets = matrix.tensors.get("offsets")
    x_sums = None if offsets is None else sum_groups(x, values.shape[1] * 2, format.group_size)
    if format.floating and format.bits == 8:
        values = values.view(FP8)
    width = x.shape[1]
    tile = assignments.tile if assignments else tile_of(x, tokens, matrix.outputs, format)
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    program_outputs = tile.rows // 2 if gated else tile.rows
    num_rows = len(assignments.assignments) if assignments else tokens
    grid = (-(-outputs // program_outputs) * -(-num_rows // tile.bt),)
    arguments: tuple[Any, ...] = (
        x,
        x_scales,
        values,
        scales,
        NO_BIAS if matrix.bias is None else matrix.bias,
        0 if matrix.bias is None else matrix.outputs,
        out,
        tokens,
        outputs,
        matrix.inputs,
        program_outputs // 8,
        x.stride(0),
        out.stride(0),
        assignments.assignments if assignments else None,
        assignments.tile_experts if assignments else None,
        assignments.assignments_per_row if assignments else 1,
        num_rows,
        assignments.weight_size if assignments else 0,
        assignments.scales_size if assignments else 0,
    )
    constants: dict[str, Any] = {"DTYPE": dtype, "GATED": gated or None, "BN": tile.bn, "BT": tile.bt}
    if format.bits == 4:
        kernel, size = kernels.product_int4, format.group_size
        arguments += offsets, x_sums
        unroll = tile.bk // (2 * size)
        constants |= {"SIZE": size, "UNROLL": unroll, "EVEN": width % tile.bk == 0, "FLOATS": format.floating}
    elif format.group_size:
        kernel = kernels.product_fp8_blocks
    else:
        kernel = kernels.product
        constants |= {"BK": tile.bk, "EVEN": width % tile.bk == 0}
    launch(kernel, grid, *arguments, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return out


def tile_of(x: Tensor, tokens: int, rows: int, format: Format) -> Tile:
    """Choose the tile for a number of tokens and rows of weights.

    Args:
        x: inputs before quantization, for their device and dtype.
    """
    itemsize = 1 if format.activation_bits else x.itemsize
    return _tile(architecture(x.device), sm_count(x.device), tokens, rows, itemsize, format)


_tile = cache(choose_tile)


def embedding(token_ids: Tensor, matrix: Matrix, first: int = 0, out: Tensor | None = None) -> Tensor:
    """See ``reference.embedding``."""
    tokens, format = len(token_ids), matrix.format
    values, scales = matrix.tensors["values"], matrix.tensors.get("scales")
    if format.floating and format.bits == 8:
        values = values.view(FP8)
    out = values.new_empty((tokens, matrix.inputs), dtype=matrix.dtype) if out is None else out
    offsets, order = matrix.tensors.get("offsets"), matrix.tensors.get("order")
    arguments = token_ids, values, scales, offsets, order, out, first, matrix.outputs, matrix.inputs, out.stride(0)
    launch(
        kernels.gather_rows,
        (tokens, -(-matrix.inputs // COLUMNS)),
        *arguments,
        GROUP_SIZE=format.group_size,
        ROWS_PER_SCALE=format.rows_per_scale,
        BITS=format.bits,
        FLOATS=format.is_mxfp4,
        ROTATION=format.rotation_block(matrix.inputs),
        COLUMNS=COLUMNS,
    )
    return out
