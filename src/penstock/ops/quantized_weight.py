"""A quantized matrix as checkpoints give it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.core.quantization import Format


@dataclass(frozen=True)
class QuantizedWeight:
    """``[out, in]`` in integers or 8-bit floating-point numbers, with scales.

    A weight is ``values * scale + offset``, of its output and group of inputs.
    """

    values: Tensor
    """``[out, in]``: int8, of 4 bits in [-8, 7]; float8_e4m3fn where the format is ``floating``."""
    scales: Tensor
    """``[ceil(out / rows_per_scale), groups]`` float32."""
    format: Format
    offsets: Tensor | None = None
    """``[out, groups]`` float32 where the format is ``asymmetric``."""
    order: Tensor | None = None
    """``[in]`` int64: column ``j`` of ``values`` is input ``order[j]`` (GPTQ's act-order); None is as they come."""

    def dequantize(self) -> Tensor:
        """``[out, in]`` float32, inputs as they come."""
        outputs, inputs = self.values.shape
        rows = min(self.format.rows_per_scale or outputs, outputs)
        columns = min(self.format.group_size or inputs, inputs)

        weight = self.values.float()
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

    def _in_order(self, weight: Tensor) -> Tensor:
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def to(self, device: torch.device, activation_bits: int) -> QuantizedWeight:
        """The same weights on a device, to multiply by such activations."""
        format = replace(self.format, activation_bits=activation_bits)
        offsets, order = (None if each is None else each.to(device) for each in (self.offsets, self.order))
        return QuantizedWeight(self.values.to(device), self.scales.to(device), format, offsets, order)

    def rows(self, first: int, end: int) -> QuantizedWeight:
        """The outputs from ``first`` to ``end``, of a format with a scale an output."""
        assert self.format.rows_per_scale == 1
        offsets = None if self.offsets is None else self.offsets[first:end]
        return QuantizedWeight(self.values[first:end], self.scales[first:end], self.format, offsets, self.order)
