"""Conversion of GGUF block formats to integers with scales.

In most formats a weight is an integer times the scale of its group, in some plus an offset; MXFP4 keeps its codes. The
conversion does not round. Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.gguf_file import TensorType
from penstock.ops import QuantizedWeight

from .mxfp4 import scales_of

CHUNK = 2**22
"""Number of weights converted at a time; this number fits into the CPU's caches."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Integers of IQ4_NL and IQ4_XS by 4-bit index."""


class Blocks(NamedTuple):
    """Integers and scales of blocks."""

    values: Tensor
    """``[rows, blocks, ...]`` int8."""
    scales: Tensor
    """``[rows, blocks, groups]`` float32."""
    offsets: Tensor | None = None
    """``[rows, blocks, groups]`` float32 for asymmetric formats, else None."""


def read_blocks(type: TensorType, rows: Tensor) -> QuantizedWeight:
    """Convert rows of a matrix.

    Args:
        type: GGUF type; its name must be a key of ``READERS``.
        rows: encoded rows, ``[out, bytes]`` uint8.
    """
    format, read = type.format, READERS[type.name]
    outputs, blocks = rows.shape[0], rows.shape[1] // type.size
    inputs = blocks * type.block
    groups = inputs // format.group_size
    values = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, groups)
    offsets = torch.empty(outputs, groups) if format.asymmetric else None
    step = max(CHUNK // inputs, 1)
    for first in range(0, outputs, step):
        chunk = slice(first, first + step)
        converted = read(rows[chunk].unflatten(1, (blocks, -1)))
        values[chunk] = converted.values.flatten(1)
        scales[chunk] = converted.scales.flatten(1)
        if offsets is not None and converted.offsets is not None:
            offsets[chunk] = converted.offsets.flatten(1)
    return QuantizedWeight(values, scales, format, offsets)


# --- One scale per block ----------------------------------------------------------------------------------------------


def _q8_0(blocks: Tensor) -> Blocks:
    return Blocks(blocks[..., 2:].view(torch.int8), _half(blocks, 0))


def _q4_0(blocks: Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[..., 2:]) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Blocks:
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    return Blocks(_nibbles(blocks[..., 4:]) - 8, scale, minimum + 8 * scale)


def _q5_0(blocks: Tensor) -> Blocks:
    values = _nibbles(blocks[..., 6:]) | _single_bits(blocks[..., 2:6]) << 4
    return Blocks(values - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Blocks:
    values = _nibbles(blocks[..., 8:]) | _single_bits(blocks[..., 4:8]) << 4
    return Blocks(values, _half(blocks, 0), _half(blocks, 2))


def _iq4_nl(blocks: Tensor) -> Blocks:
    return Blocks(_look_up(IQ4_VALUES, _nibbles(blocks[..., 2:])), _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Blocks:
    """e2m1 codes minus 8, as in ``QuantizedWeight.values``."""
    return Blocks(_nibbles(blocks[..., 1:]) - 8, scales_of(blocks[..., :1]))


# --- Blocks of 256: a group's scale is an integer times the scale of its block ----------------------------------------


def _q2_k(blocks: Tensor) -> Blocks:
    scales, bits = blocks[..., :16], blocks[..., 16:80]
    return Blocks(_fields(bits, 32, 2), _half(blocks, 80) * (scales & 15), _half(blocks, 82) * -(scales >> 4).float())


def _q3_k(blocks: Tensor) -> Blocks:
    high, low, packed = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    scales = _fields(packed[..., :8], 8, 4) | _fields(packed[..., 8:], 4, 2) << 4
    values = _fields(low, 32, 2) | _fields(high, 32, 1) << 2
    return Blocks(values - 4, _half(blocks, 108) * (scales - 32))


def _q4_k(blocks: Tensor) -> Blocks:
    scale, offset = _scales_and_minima(blocks)
    return Blocks(_fields(blocks[..., 16:], 32, 4) - 8, scale, offset + 8 * scale)


def _q5_k(blocks: Tensor) -> Blocks:
    values = _fields(blocks[..., 48:], 32, 4) | _fields(blocks[..., 16:48], 32, 1) << 4
    return Blocks(values, *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> Blocks:
    low, high, scales = blocks[..., :128], blocks[..., 128:192], blocks[..., 192:208]
    values = _fields(low, 64, 4) | _fields(high, 32, 2) << 4
    return Blocks(values - 32, _half(blocks, 208) * scales.view(torch.int8))


def _iq4_xs(blocks: Tensor) -> Blocks:
    high, low, bits = blocks[..., 2:4], blocks[..., 4:8], blocks[..., 8:]
    scales = _fields(low, 1, 4) | _fields(high, 1, 2) << 4
    values = _look_up(IQ4_VALUES, _fields(bits, 16, 4))
    return Blocks(values, _half(blocks, 0) * (scales - 32))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K and Q5_K. The 12 bytes after the two float16 factors of a block have eight scales and
    eight minima, 6 bits each."""
    scales, minima, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), -1)
    minima = torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), -1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * -minima.float()


# --- Bits -------------------------------------------------------------------------------------------------------------


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 value at a byte offset of each block, ``[rows, blocks, 1]`` float32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(bits: Tensor) -> Tensor:
    """The low 4 bits of all bytes, then the high 4 bits."""
    return _fields(bits, bits.shape[-1], 4)


def _single_bits(bits: Tensor) -> Tensor:
    """The bits of all bytes, lowest bit of each byte first."""
    return _fields(bits, 1, 1)


def _fields(bits: Tensor, run: int, width: int) -> Tensor:
    """Unpack integers of ``width`` bits, ``[..., 8 / width * bytes]`` int8. Each run of ``run`` bytes yields the lowest
    field of all its bytes, then the next field, and so on."""
    runs = bits.unflatten(-1, (-1, 1, run))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(-1)
    fields: Tensor = runs >> shifts & (1 << width) - 1
    return fields.view(torch.int8).flatten(-3)


def _look_up(table: tuple[int, ...], indices: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.int8).index_select(0, indices.int().flatten()).view_as(indices)


READERS: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Readers of blocks, ``[rows, blocks, bytes]`` uint8, by type name."""
