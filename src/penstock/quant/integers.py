"""Integers of checkpoints: packed into 32-bit words, with zero points, in an order of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.core.errors import invalid
from penstock.core.quantization import Format
from penstock.ops import QuantizedWeight


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack unsigned integers densely, the first one in the lowest bits of the first word.

    Args:
        values: ``[rows, count]`` uint8, below ``2 ** bits``.

    Returns:
        ``[rows, ceil(count * bits / 32)]`` int32.
    """
    rows, count = values.shape
    words = -(-count * bits // 32)
    values = pad(values, (0, -count % 8))
    if bits == 8:
        parts = values
    elif bits == 4:
        parts = values[:, ::2] | values[:, 1::2] << 4
    else:  # 8 values take as many bytes as each has bits
        packed = (values.view(rows, -1, 8).long() << torch.arange(0, 8 * bits, bits)).sum(-1)
        parts = (packed[:, :, None] >> torch.arange(0, 8 * bits, 8)).to(torch.uint8).flatten(1)
    return pad(parts, (0, 4 * words - parts.shape[1])).flatten().contiguous().view(torch.int32).view(rows, words)


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_bits``: ``[rows, words]`` int32 to ``[rows, count]`` uint8."""
    parts = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return parts[:, :count]
    if bits == 4:
        return torch.stack((parts & 15, parts >> 4), -1).flatten(1)[:, :count]
    rows, eights = len(parts), -(-count // 8)
    parts = pad(parts, (0, max(eights * bits - parts.shape[1], 0)))[:, : eights * bits]
    packed = (parts.reshape(rows, eights, bits).long() << torch.arange(0, 8 * bits, 8)).sum(-1)
    values: Tensor = (packed[:, :, None] >> torch.arange(0, 8 * bits, bits)) & (2**bits - 1)
    return values.to(torch.uint8).flatten(1)[:, :count]


def from_unsigned(
    values: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, format: Format, order: Tensor | None = None
) -> QuantizedWeight:
    """The matrix whose weights are ``(values - zeros) * scales``.

    Args:
        values: ``[out, in]`` uint8 below ``2 ** bits``, inputs as they come. It is overwritten.
        zeros: ``[out, groups]`` uint8; None is ``2 ** (bits - 1)`` everywhere.
        scales: ``[out, groups]``, of floating-point numbers.
        format: ``asymmetric`` where there are zeros.
        order: as of ``QuantizedWeight``.
    """
    half = 1 << (bits - 1)
    if order is not None:
        values = values[:, order]
    scales = scales.float().contiguous()
    offsets = None if zeros is None else (half - zeros.short()) * scales
    signed = values.sub_(half).view(torch.int8).contiguous()  # modulo 256
    return QuantizedWeight(signed, scales, format, offsets, order)


def input_order(groups: Tensor, group_size: int, name: str) -> Tensor | None:
    """The order in which a matrix's inputs lie group by group: ``[in]`` int64; None where they do so as they come.

    Args:
        groups: ``[in]``, the group of each input.
        name: of the tensor.

    Raises ``PenstockError`` (``invalid``) where a group has another size than ``group_size``, the last one than what
    is left.
    """
    (inputs,), size = groups.shape, group_size or len(groups)
    groups = groups.long()
    expected = torch.arange(inputs) // size
    if torch.equal(groups, expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise invalid("model", f"tensor {name} does not give each group {size} inputs")
    return order
