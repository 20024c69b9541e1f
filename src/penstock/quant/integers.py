"""Quantized integers of checkpoints: packing into int32, zero points, and the order of inputs (act-order)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.core.errors import invalid
from penstock.core.quantization import Format
from penstock.ops import QuantizedWeight


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack unsigned integers densely. The first integer of a row is in the lowest bits of the first int32.

    Args:
        values: ``[rows, count]`` uint8, below ``2 ** bits``.

    Returns:
        ``[rows, ceil(count * bits / 32)]`` int32.
    """
    rows, count = values.shape
    columns = -(-count * bits // 32)
    values = pad(values, (0, -count % 8))
    if bits == 8:
        packed = values
    elif bits == 4:
        packed = values[:, ::2] | values[:, 1::2] << 4
    else:  # 8 integers fill `bits` bytes
        blocks = (values.view(rows, -1, 8).long() << torch.arange(0, 8 * bits, bits)).sum(-1)
        packed = (blocks[:, :, None] >> torch.arange(0, 8 * bits, 8)).to(torch.uint8).flatten(1)
    return pad(packed, (0, 4 * columns - packed.shape[1])).flatten().contiguous().view(torch.int32).view(rows, columns)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of ``pack_bits``: ``[rows, ceil(count * bits / 32)]`` int32 to ``[rows, count]`` uint8."""
    packed = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return packed[:, :count]
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, :count]
    rows, num_blocks = len(packed), -(-count // 8)  # 8 integers fill `bits` bytes
    packed = pad(packed, (0, max(num_blocks * bits - packed.shape[1], 0)))[:, : num_blocks * bits]
    blocks = (packed.reshape(rows, num_blocks, bits).long() << torch.arange(0, 8 * bits, 8)).sum(-1)
    values: Tensor = (blocks[:, :, None] >> torch.arange(0, 8 * bits, bits)) & (2**bits - 1)
    return values.to(torch.uint8).flatten(1)[:, :count]


def from_unsigned(
    values: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, format: Format, order: Tensor | None = None
) -> QuantizedWeight:
    """Return the matrix whose weights are ``(values - zeros) * scales``.

    Args:
        values: ``[out, in]`` uint8 below ``2 ** bits``, with inputs in their original order. The tensor is overwritten.
        zeros: zero points, ``[out, groups]`` uint8; None: ``2 ** (bits - 1)`` for all groups.
        scales: ``[out, groups]``, in a floating-point dtype.
        format: format of the result, ``asymmetric`` if ``zeros`` is given.
        order: order of inputs in the result (``QuantizedWeight.order``); None: the original order.
    """
    half = 1 << (bits - 1)
    if order is not None:
        values = values[:, order]
    scales = scales.float().contiguous()
    offsets = None if zeros is None else (half - zeros.short()) * scales
    signed = values.sub_(half).view(torch.int8).contiguous()  # wraps around modulo 256
    return QuantizedWeight(signed, scales, format, offsets, order)


def input_order(groups: Tensor, group_size: int, name: str) -> Tensor | None:
    """Return the order that sorts a matrix's inputs by group, ``[in]`` int64; None if the inputs are already sorted.

    Args:
        groups: ``[in]``, the group of each input.
        name: name of the tensor, for error messages.

    Raises ``PenstockError`` (``invalid``) unless each group has ``group_size`` inputs (the last group: the remainder).
    """
    (inputs,), size = groups.shape, group_size or len(groups)
    groups = groups.long()
    expected = torch.arange(inputs) // size
    if torch.equal(groups, expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise invalid("model", f"tensor {name} must assign {size} inputs to each group: quantize the model again")
    return order
