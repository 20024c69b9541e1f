"""FP8 checkpoints (e4m3): one scale per tensor, per output channel, or per block (128 x 128 in DeepSeek-V3). Experts
may be in mxfp4 (DeepSeek-V4)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import MX_BLOCK, UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from . import mxfp4
from .checkpoint_format import FLOATS, TensorSource, num_groups, read_tensor
from .config_fields import count, unsupported

SCALES = (*FLOATS, torch.float8_e8m0fnu)
"""Dtypes of scales; float8_e8m0fnu values are powers of two (ue8m0)."""
EXPERT = re.compile(r"\.experts\.\d+\.")
"""Part of the names of the matrices of experts that a router chooses."""
STATIC_ACTIVATIONS = "activations get dynamic scales per token; static scales of the checkpoint are ignored"


def read_fp8(
    source: TensorSource, name: str, scales: str, outputs: int, inputs: int, rows: tuple[int, int], format: Format
) -> QuantizedWeight:
    """Read outputs ``rows`` of ``<name>.weight`` ``[out, in]`` e4m3, and their scales from the tensor ``scales``.

    The result has one scale per output if ``rows`` begins within a block.
    """
    first, end = rows
    values = read_tensor(source, f"{name}.weight", outputs, inputs, dtypes=(torch.float8_e4m3fn,), rows=rows)
    shape, block = source.shape(scales), format.rows_per_scale
    expected = (num_groups(outputs, block), num_groups(inputs, format.group_size))
    if shape != expected and (shape not in ((), expected[:1]) or expected[1] > 1 or (shape == () and block)):
        raise invalid("model", f"tensor {scales} has shape {shape}; {name} requires {expected}")
    stored = read_tensor(source, scales, *shape, dtypes=SCALES).float().reshape(expected)
    if block == 1:
        return QuantizedWeight(values, stored[first:end], format)
    if block == 0 or first % block == 0:
        return QuantizedWeight(values, stored if block == 0 else stored[first // block : -(-end // block)], format)
    per_output = stored.repeat_interleave(min(block, outputs), 0)[first:end]
    return QuantizedWeight(values, per_output, Format(8, format.group_size, floating=True))


class FP8:
    """``CheckpointFormat`` for fp8: ``<name>.weight`` e4m3, with ``weight_scale_inv`` or ``weight_scale``.

    The shape of the scales determines whether they are per block, output or tensor. Despite its name,
    ``weight_scale_inv`` is also a factor of the weights. DeepSeek-V4 calls it ``scale``, and with ``expert_dtype``
    ``fp4`` stores experts in mxfp4: ``<name>.weight`` ``[out, in / 2]`` int8, two codes per byte, and ``scale``
    ``[out, in / 32]`` float8_e8m0fnu.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        scheme = str(config.get("activation_scheme") or "dynamic").lower()
        if scheme not in ("dynamic", "static"):
            raise unsupported(f"fp8 with activation_scheme {scheme!r}; supported are 'dynamic' and 'static'")
        if (kind := config.get("fmt") or "e4m3") != "e4m3":
            raise unsupported(f"fp8 with fmt {kind!r}; only 'e4m3' is supported")
        if (experts := config.get("expert_dtype") or "fp8") not in ("fp8", "fp4"):
            raise unsupported(f"fp8 with expert_dtype {experts!r}; supported are 'fp8' and 'fp4'")
        self._fp4_experts = experts == "fp4"
        self.notes: Sequence[str] = (STATIC_ACTIVATIONS,) if scheme == "static" else ()
        self._blocks: tuple[int, int] | None = None
        if (size := config.get("weight_block_size")) is not None:
            self._blocks = block_size(size)

    def format_of(self, source: TensorSource, name: str) -> Format:
        """See ``CheckpointFormat.format_of``. A matrix with a tensor of scales is quantized."""
        if not (scales := _scales(source, name)):
            return UNQUANTIZED
        if self._fp4_experts and EXPERT.search(name):
            return mxfp4.FORMAT
        shape = source.shape(scales)
        if self._blocks and len(shape) == 2 and not scales.endswith("weight_scale"):
            return Format(8, self._blocks[1], 8, floating=True, rows_per_scale=self._blocks[0])
        return Format(8, 0, 8, floating=True, rows_per_scale=0 if shape in ((), (1,), (1, 1)) else 1)

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """See ``CheckpointFormat.shape``."""
        outputs, inputs = source.shape(f"{name}.weight")
        return outputs, inputs * (2 if self.format_of(source, name) == mxfp4.FORMAT else 1)

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """See ``CheckpointFormat.read``."""
        format, scales = self.format_of(source, name), _scales(source, name)
        if format != mxfp4.FORMAT:
            return read_fp8(source, name, scales, outputs, inputs, rows, format)
        packed = read_tensor(source, f"{name}.weight", outputs, inputs // 2, dtypes=(torch.int8,), rows=rows)
        groups = num_groups(inputs, MX_BLOCK)
        stored = read_tensor(source, scales, outputs, groups, dtypes=SCALES, rows=rows)
        return QuantizedWeight(
            mxfp4.unpack(packed.view(torch.uint8).unflatten(1, (groups, -1))), stored.float(), format
        )


def _scales(source: TensorSource, name: str) -> str:
    """Name of the tensor with the scales of a matrix; empty if the matrix has no scales."""
    names = (f"{name}.weight_scale_inv", f"{name}.weight_scale", f"{name}.scale")
    return next((scales for scales in names if source.has(scales)), "")


def block_size(size: Any) -> tuple[int, int]:
    """Check a block size, and return the outputs and inputs of a block. Raises ``PenstockError``: ``invalid`` unless
    the size is two positive integers, ``unsupported`` for a size without kernels."""
    if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
        raise invalid("model", f"the block size in config.json is {size!r:.60}; it must be two integers")
    outputs, inputs = (count(value, "the block size") for value in size)
    if inputs % 8:
        raise unsupported(f"blocks of {inputs} inputs; the number must be a multiple of 8")
    return outputs, inputs


def pack(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Quantize a matrix ``[out, in]`` to e4m3 with one scale per block of ``rows`` outputs and ``columns`` inputs
    (0: all outputs or inputs).

    Returns:
        The values ``[out, in]`` float8_e4m3fn, and the scales ``[ceil(out / rows), ceil(in / columns)]`` float32.
    """
    (height, width), rows, columns = weight.shape, rows or len(weight), columns or weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (blocks.abs().amax((1, 3), keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scales).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:height, :width].contiguous(), scales[:, 0, :, 0]
