"""Matrices packed for the CUDA kernels, and the products with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from penstock.core import Code, PenstockError
from penstock.core.quantization import MAX_FP8, UNQUANTIZED, Format

from ..quantized_weight import QuantizedWeight
from .elementwise import silu_and_mul
from .kernels import matrix as kernels
from .launch import MIN_FP8, architecture, launch, sm_count
from .tiles import choose_tile

LAYOUT = "cuda-1"
"""Version of the packed layout."""
PANEL, BLOCK = 64, 128
"""Outputs of a panel, and inputs of a block of 8-bit weights."""
CHUNK = 128 * PANEL
"""Outputs that are quantized at a time, to need little memory."""
MIN_MAGNITUDE = 1e-30
"""Vectors whose largest magnitude is not above this are quantized to zeros."""
FP8 = torch.float8_e4m3fn
NO_BIAS = torch.empty(0)
"""Given where there is none, and not read: its address is 0."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(eq=False)
class Matrix:
    """A matrix ``[out, in]`` and a bias ``[out]`` or none."""

    tensors: dict[str, Tensor]
    """``values``, and of quantized weights ``scales`` (float32).

    Unquantized: ``values`` are ``[out, in]``. 8 bits: ``[panels, blocks, 64, 128]``, scales ``[panels * 64]`` or, of
    blocks, ``[out / 128, in / 128]``. 4 bits: ``[panels, blocks, 64, group_size]``, a block having two groups of
    inputs, one in the low halves of its bytes; scales ``[panels, blocks, 2, 64]`` are a sixteenth. What is past the end
    of the matrix is zero."""
    bias: Tensor | None
    """float32."""
    outputs: int
    inputs: int
    dtype: torch.dtype
    """Dtype of products and embeddings, whatever the format."""
    format: Format


def pack(parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Matrix:
    """As ``reference.pack``. An unquantized matrix of one part is not copied."""
    dtype, inputs = parts[0].dtype, parts[0].shape[1]
    outputs = sum(len(part) for part in parts)
    _refuse(format, dtype, parts[0].device)
    if not format.bits:
        weight = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).contiguous()
        return from_packed({"values": weight}, inputs, outputs, dtype, bias, format)
    weight = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    tensors = {
        name: torch.zeros(shape, dtype=kind, device=weight.device)
        for name, (shape, kind) in packed_shapes(inputs, outputs, dtype, format).items()
    }
    whole = weight.abs().amax().float() if not format.rows_per_scale else None
    for first in range(0, outputs, CHUNK):
        _pack_chunk(tensors, weight[first : first + CHUNK].float(), first, format, whole)
    return from_packed(tensors, inputs, outputs, dtype, bias, format)


def _pack_chunk(tensors: dict[str, Tensor], weight: Tensor, first: int, format: Format, whole: Tensor | None) -> None:
    """Quantize outputs ``first`` and on, and put them into their panels; ``whole`` is the matrix's largest magnitude,
    if it has one scale."""
    values, scales = tensors["values"], tensors["scales"]
    outputs, inputs = weight.shape
    panels = slice(first // PANEL, -(-(first + outputs) // PANEL))
    count = panels.stop - panels.start
    size = values.shape[1] * (2 * format.group_size if format.bits == 4 else BLOCK)
    weight = pad(weight, (0, size - inputs, 0, count * PANEL - outputs))
    if format.bits == 4:
        groups = weight.view(count, PANEL, values.shape[1], 2, format.group_size)
        maximum = groups.abs().amax(-1, keepdim=True)
        scale = torch.where((groups == maximum).any(-1, keepdim=True), -maximum, maximum) / 8
        integers = (groups * _inverse(maximum, 1 / scale)).round().clamp(max=7).to(torch.int8)
        values[panels] = ((integers[..., 0, :] & 15) | (integers[..., 1, :] << 4)).transpose(1, 2)
        scales[panels] = (scale[..., 0] / 16).permute(0, 2, 3, 1)
        return
    rows, columns = (format.rows_per_scale, format.group_size) if format.group_size else (1, size)
    groups = pad(weight, (0, 0, 0, -len(weight) % rows)).view(-1, rows, size // columns, columns)
    maximum = groups.abs().amax((1, 3), keepdim=True)
    if whole is not None:
        maximum = whole.expand_as(maximum)
    largest = torch.full_like(maximum, MAX_FP8 if format.floating else 127)
    scale = maximum / largest
    if format.floating:
        quantized = (groups * _inverse(maximum, largest / maximum)).clamp(-MAX_FP8, MAX_FP8).to(FP8).view(torch.int8)
    else:
        quantized = (groups * _inverse(maximum, 1 / scale)).round().to(torch.int8)
    kept = scale[: -(-outputs // rows), 0, :, 0]
    scales[first // rows :][: len(kept)] = kept if format.group_size else kept[:, 0]
    quantized = quantized.view(-1, size)[: len(weight)]
    values[panels] = quantized.view(count, PANEL, -1, BLOCK).transpose(1, 2)


def _inverse(maximum: Tensor, inverse: Tensor) -> Tensor:
    return torch.where(maximum > MIN_MAGNITUDE, inverse, 0)


def packed_shapes(
    inputs: int, outputs: int, dtype: torch.dtype, format: Format
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of packed tensors."""
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
    return {"values": ((panels, blocks, PANEL, size), torch.int8), "scales": (scales, torch.float32)}


def _refuse(format: Format, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ``PenstockError`` (``unsupported``) for what there are no kernels for."""
    if dtype not in DTYPES:
        raise PenstockError(Code.UNSUPPORTED, f"the CUDA kernels compute in bfloat16, float16 or float32, not {dtype}")
    if format.floating and architecture(device).capability < MIN_FP8:
        raise PenstockError(Code.UNSUPPORTED, "fp8 needs a GPU of compute capability 8.9 or higher", "quantization")
    known = (
        not format.bits
        or (format.bits == 4 and format.group_size in (32, 64, 128))
        or (format.bits == 8 and not format.group_size)
        or (format.floating and format.group_size == format.rows_per_scale == BLOCK)
    )
    if not known or (format.floating and not format.activation_bits):
        raise PenstockError(Code.UNSUPPORTED, f"there are no CUDA kernels for {format}", "quantization")


def pack_quantized(parts: Sequence[QuantizedWeight], dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """As ``reference.pack_quantized``."""
    raise PenstockError(Code.UNSUPPORTED, f"there are no CUDA kernels for {parts[0].format}", "quantization")


def supports(format: Format, dtype: torch.dtype) -> bool:
    """As ``reference.supports``."""
    return False


def packed_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """As ``reference.packed_tensors``."""
    return dict(matrix.tensors) if matrix.format.bits else {}


def from_packed(
    tensors: Mapping[str, Tensor], inputs: int, outputs: int, dtype: torch.dtype, bias: Tensor | None, format: Format
) -> Matrix:
    """As ``reference.from_packed``. Raises ``PenstockError`` (``internal``) for tensors of another size or dtype."""
    _refuse(format, dtype, tensors["values"].device)
    expected = packed_shapes(inputs, outputs, dtype, format)
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} != expected:
        raise PenstockError(Code.INTERNAL, "packed weights have another size")  # kernels would read past their end
    return Matrix(dict(tensors), None if bias is None else bias.float(), outputs, inputs, dtype, format)


def quantize(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Rows ``[tokens, in]`` in 8 bits, padded with zeros to whole blocks of inputs, and their scales: ``[tokens]``, or
    ``[blocks, tokens]`` where the format has one scale a block and token."""
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
        SIZE=size,
        ITEMS=BLOCK,
        num_warps=min(max(size // 8, 1), 16),
    )
    return values, scales


def use_cublas(enabled: bool) -> None:
    """Whether products of weights that are not quantized are cuBLAS's from now on, whose sums depend on the number of
    tokens."""
    global _cublas
    _cublas = enabled


_cublas = False


def linear(x: Tensor, matrix: Matrix, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
    """As ``reference.linear``."""
    if _cublas and not matrix.format.bits:
        bias = None if matrix.bias is None else matrix.bias.to(x.dtype)
        product = torch.nn.functional.linear(x, matrix.tensors["values"], bias)
        product = product.float() if out_float32 else product
        return product if out is None else out.copy_(product)
    out = x.new_empty((len(x), matrix.outputs), dtype=torch.float32 if out_float32 else x.dtype) if out is None else out
    return _product(x, matrix, out, gated=False)


def linear_silu_and_mul(x: Tensor, matrix: Matrix, out: Tensor | None = None) -> Tensor:
    """As ``reference.linear_silu_and_mul``; one kernel."""
    if _cublas and not matrix.format.bits:
        return silu_and_mul(linear(x, matrix), out)
    out = x.new_empty((len(x), matrix.outputs // 2)) if out is None else out
    return _product(x, matrix, out, gated=True)


def _product(x: Tensor, matrix: Matrix, out: Tensor, gated: bool) -> Tensor:
    format, tokens = matrix.format, len(x)
    if tokens == 0:
        return out
    values, scales = matrix.tensors["values"], matrix.tensors.get("scales")
    dtype, x_scales = DTYPES[x.dtype], None
    x = x if x.stride(1) == 1 else x.contiguous()
    if format.activation_bits:
        x, x_scales = quantize(x, format)
    if format.floating:
        values = values.view(FP8)
    width = x.shape[1]
    tile = _tile(architecture(x.device), sm_count(x.device), tokens, matrix.outputs, x.itemsize, format)
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    share = tile.rows // 2 if gated else tile.rows
    grid = (-(-outputs // share) * -(-tokens // tile.bt),)
    arguments = (
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
        share // 8,
        x.stride(0),
        out.stride(0),
    )
    constants: dict[str, Any] = {"DTYPE": dtype, "GATED": gated, "BN": tile.bn, "BT": tile.bt}
    if format.bits == 4:
        kernel, size = kernels.product_int4, format.group_size
        unroll = tile.bk // (2 * size)
        constants |= {"SIZE": size, "UNROLL": unroll, "EVEN": width % tile.bk == 0}
    elif format.group_size:
        kernel = kernels.product_fp8_blocks
    else:
        kernel = kernels.product
        constants |= {"BK": tile.bk, "EVEN": width % tile.bk == 0}
    launch(kernel, grid, *arguments, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
    return out


_tile = cache(choose_tile)


def embedding(token_ids: Tensor, matrix: Matrix, first: int = 0, out: Tensor | None = None) -> Tensor:
    """As ``reference.embedding``."""
    tokens, format = len(token_ids), matrix.format
    values, scales = matrix.tensors["values"], matrix.tensors.get("scales")
    if format.floating:
        values = values.view(FP8)
    out = values.new_empty((tokens, matrix.inputs), dtype=matrix.dtype) if out is None else out
    columns = 1024
    arguments = token_ids, values, scales, out, first, matrix.outputs, matrix.inputs, out.stride(0)
    launch(
        kernels.gather_rows,
        (tokens, -(-matrix.inputs // columns)),
        *arguments,
        GROUP_SIZE=format.group_size,
        ROWS_PER_SCALE=format.rows_per_scale,
        BITS=format.bits,
        COLUMNS=columns,
    )
    return out
