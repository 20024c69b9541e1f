"""A quantized matrix of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.core.quantization import Format

from .hadamard import hadamard

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 4-bit floating-point codes of mxfp4: a sign bit, two exponent bits, and a mantissa bit."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix ``[out, in]`` of 8- or 4-bit integers or floating-point numbers, with scales.

    A weight is ``values * scale + offset``, with the scale and offset of its output and group of inputs. If the format
    has a rotation, the result is the rotated weight.
    """

    values: Tensor
    """``[out, in]``. Integers: int8, with 4 bits in [-8, 7]. e4m3: float8_e4m3fn. mxfp4: int8, the index in ``E2M1``
    minus 8."""
    scales: Tensor
    """``[ceil(out / rows_per_scale), groups]`` float32."""
    format: Format
    offsets: Tensor | None = None
    """``[out, groups]`` float32 if the format is ``asymmetric``."""
    order: Tensor | None = None
    """``[in]`` int64: column ``j`` of ``values`` is input ``order[j]`` (GPTQ's act-order); None: unpermuted."""

    def __post_init__(self) -> None:
        if self.format.rotation and self.order is not None:
            raise ValueError(f"rotated weights ({self.format}) cannot have permuted inputs (order)")

    def dequantize(self) -> Tensor:
        """Return the weights ``[out, in]`` float32, unpermuted and unrotated."""
        return hadamard(self.dequantize_rotated(), self.format.rotation_block(self.values.shape[1]))

    def dequantize_rotated(self) -> Tensor:
        """Return the weights ``[out, in]`` float32, unpermuted and still rotated."""
        outputs, inputs = self.values.shape
        rows = min(self.format.rows_per_scale or outputs, outputs)
        columns = min(self.format.group_size or inputs, inputs)

        weight = self._numbers()
        if rows == 1 and inputs % columns == 0:
            groups = weight.view(outputs, -1, columns)  # needs no copies, and is several times faster than `expand`
            groups *= self.scales.unsqueeze(-1)
            if self.offsets is not None:
                groups += self.offsets.unsqueeze(-1)
            return self._in_order(weight)

        def expand(groups: Tensor) -> Tensor:
            return groups.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]

        weight *= expand(self.scales)
        if self.offsets is not None:
            weight += expand(self.offsets)
        return self._in_order(weight)

    def _numbers(self) -> Tensor:
        """``values`` in float32."""
        if not self.format.is_mxfp4:
            return self.values.float()
        return torch.tensor(E2M1, device=self.values.device)[self.values.int() + 8]

    def _in_order(self, weight: Tensor) -> Tensor:
        """Undo the permutation of the inputs."""
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def to(self, device: torch.device, activations: Format) -> QuantizedWeight:
        """Copy the weights to a device, with the activation format of ``activations``."""
        bits, groups = activations.activation_bits, activations.activation_groups
        format = replace(self.format, activation_bits=bits, activation_groups=groups)
        offsets, order = (None if tensor is None else tensor.to(device) for tensor in (self.offsets, self.order))
        return QuantizedWeight(self.values.to(device), self.scales.to(device), format, offsets, order)

    def with_scale_per_output(self) -> QuantizedWeight:
        """Return the same weights with a scale for each output, in place of blocks of outputs that share one."""
        if self.format.rows_per_scale == 1:
            return self
        outputs = len(self.values)
        scales = self.scales.repeat_interleave(self.format.rows_per_scale or outputs, 0)[:outputs]
        return replace(self, scales=scales, format=replace(self.format, rows_per_scale=1))

    def rows(self, first: int, end: int) -> QuantizedWeight:
        """Return the outputs ``first`` to ``end`` (exclusive) of a format with one scale per output."""
        assert self.format.rows_per_scale == 1
        offsets = None if self.offsets is None else self.offsets[first:end]
        return QuantizedWeight(self.values[first:end], self.scales[first:end], self.format, offsets, self.order)
