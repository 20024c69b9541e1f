"""A quantized matrix as checkpoints give it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.core.quantization import Format

from .hadamard import hadamard

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit floating-point numbers of mxfp4 by their code: a sign, two bits of exponent, and one of mantissa."""


@dataclass(frozen=True)
class QuantizedWeight:
    """``[out, in]`` in integers or floating-point numbers of 8 or 4 bits, with scales.

    A weight is ``values * scale + offset``, of its output and group of inputs; where the format rotates, this is the
    rotated weight.
    """

    values: Tensor
    """``[out, in]``: int8, of 4 bits in [-8, 7]; float8_e4m3fn where the format is ``floating``, but int8 of mxfp4: a
    place in ``E2M1`` less 8."""
    scales: Tensor
    """``[ceil(out / rows_per_scale), groups]`` float32."""
    format: Format
    offsets: Tensor | None = None
    """``[out, groups]`` float32 where the format is ``asymmetric``."""
    order: Tensor | None = None
    """``[in]`` int64: column ``j`` of ``values`` is input ``order[j]`` (GPTQ's act-order); None is as they come."""

    def __post_init__(self) -> None:
        if self.format.rotation and self.order is not None:
            raise ValueError("rotated weights have no order of inputs")

    def dequantize(self) -> Tensor:
        """``[out, in]`` float32, inputs as they come and not rotated."""
        return hadamard(self.dequantize_rotated(), self.format.rotation_block(self.values.shape[1]))

    def dequantize_rotated(self) -> Tensor:
        """As ``dequantize``, but rotated where the format rotates."""
        outputs, inputs = self.values.shape
        rows = min(self.format.rows_per_scale or outputs, outputs)
        columns = min(self.format.group_size or inputs, inputs)

        weight = self._numbers()
        if rows == 1 and inputs % columns == 0:
            groups = weight.view(outputs, -1, columns)  # which are several times as fast without copies
            groups *= self.scales.unsqueeze(-1)
            if self.offsets is not None:
                groups += self.offsets.unsqueeze(-1)
            return self._in_order(weight)

        def spread(groups: Tensor) -> Tensor:
            return groups.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]

        weight *= spread(self.scales)
        if self.offsets is not None:
            weight += spread(self.offsets)
        return self._in_order(weight)

    def _numbers(self) -> Tensor:
        """``values`` in float32."""
        if not self.format.is_mxfp4:
            return self.values.float()
        return torch.tensor(E2M1, device=self.values.device)[self.values.int() + 8]

    def _in_order(self, weight: Tensor) -> Tensor:
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def to(self, device: torch.device, activations: Format) -> QuantizedWeight:
        """The same weights on a device, to multiply by activations of another format."""
        bits, groups = activations.activation_bits, activations.activation_groups
        format = replace(self.format, activation_bits=bits, activation_groups=groups)
        offsets, order = (None if each is None else each.to(device) for each in (self.offsets, self.order))
        return QuantizedWeight(self.values.to(device), self.scales.to(device), format, offsets, order)

    def rows(self, first: int, end: int) -> QuantizedWeight:
        """The outputs from ``first`` to ``end``, of a format with a scale an output."""
        assert self.format.rows_per_scale == 1
        offsets = None if self.offsets is None else self.offsets[first:end]
        return QuantizedWeight(self.values[first:end], self.scales[first:end], self.format, offsets, self.order)
