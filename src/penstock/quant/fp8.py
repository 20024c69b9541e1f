"""Checkpoints in 8-bit floating-point numbers (e4m3): one scale a matrix, an output, or a block, as DeepSeek-V3's
128 by 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from .checkpoint_format import FLOATS, TensorSource, num_groups, read_tensor
from .config_fields import count, unsupported

SCALES = (*FLOATS, torch.float8_e8m0fnu)
"""Dtypes of scales; the last are powers of two (ue8m0)."""
STATIC_ACTIVATIONS = "activations are scaled by their own magnitude, token by token, and not by the checkpoint's scales"


def read_fp8(
    source: TensorSource, name: str, scales: str, outputs: int, inputs: int, rows: tuple[int, int], format: Format
) -> QuantizedWeight:
    """A matrix of ``<name>.weight`` ``[out, in]`` e4m3 and scales, one a matrix, an output or a block, which weights
    are multiplied by. Rows from within a block get a scale an output.

    Args:
        scales: name of their tensor.
    """
    first, end = rows
    values = read_tensor(source, f"{name}.weight", outputs, inputs, dtypes=(torch.float8_e4m3fn,), rows=rows)
    shape, block = source.shape(scales), format.rows_per_scale
    expected = (num_groups(outputs, block), num_groups(inputs, format.group_size))
    if shape != expected and (shape not in ((), expected[:1]) or expected[1] > 1 or (shape == () and block)):
        raise invalid("model", f"tensor {scales} has shape {shape}, and {name} wants {expected}")
    stored = read_tensor(source, scales, *shape, dtypes=SCALES).float().reshape(expected)
    if block == 1:
        return QuantizedWeight(values, stored[first:end], format)
    if block == 0 or first % block == 0:
        own = stored if block == 0 else stored[first // block : -(-end // block)]
        return QuantizedWeight(values, own, format)
    by_output = stored.repeat_interleave(min(block, outputs), 0)[first:end]
    return QuantizedWeight(values, by_output, Format(8, format.group_size, floating=True))


class FP8:
    """``CheckpointFormat`` of ``<name>.weight`` in e4m3 with scales ``weight_scale_inv`` or ``weight_scale``: one a
    block, an output or a matrix, by their shape. Weights are multiplied by the former, too, in spite of its name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        scheme = str(config.get("activation_scheme") or "dynamic").lower()
        if scheme not in ("dynamic", "static"):
            raise unsupported(f"fp8 with the activation_scheme {scheme!r}")
        if (kind := config.get("fmt") or "e4m3") != "e4m3":
            raise unsupported(f"fp8 in {kind!r}, other than e4m3,")
        if (experts := config.get("expert_dtype") or "fp8") != "fp8":
            raise unsupported(f"fp8 with experts in {experts!r}")
        self.notes: Sequence[str] = (STATIC_ACTIVATIONS,) if scheme == "static" else ()
        self._blocks: tuple[int, int] | None = None
        if (size := config.get("weight_block_size")) is not None:
            self._blocks = block_size(size)

    def format_of(self, source: TensorSource, name: str) -> Format:
        """As ``CheckpointFormat.format_of``: what the checkpoint has scales of is quantized."""
        if not (scales := _scales(source, name)):
            return UNQUANTIZED
        shape = source.shape(scales)
        if self._blocks and len(shape) == 2 and scales.endswith("_inv"):
            return Format(8, self._blocks[1], 8, floating=True, rows_per_scale=self._blocks[0])
        return Format(8, 0, 8, floating=True, rows_per_scale=0 if shape in ((), (1,), (1, 1)) else 1)

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """As ``CheckpointFormat.read``."""
        return read_fp8(source, name, _scales(source, name), outputs, inputs, rows, self.format_of(source, name))


def _scales(source: TensorSource, name: str) -> str:
    """The name of a matrix's scales; empty where there are none."""
    names = (f"{name}.weight_scale_inv", f"{name}.weight_scale")
    return next((scales for scales in names if source.has(scales)), "")


def block_size(size: Any) -> tuple[int, int]:
    """Outputs and inputs of a block. Raises ``PenstockError`` where these are no two numbers, or no kernel has them."""
    if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
        raise invalid("model", f"the size of blocks in config.json is {size!r:.60}, and not two numbers")
    outputs, inputs = (count(each, "the size of blocks") for each in size)
    if inputs % 8:
        raise unsupported(f"blocks of {inputs} inputs, which is no multiple of 8,")
    return outputs, inputs


def pack(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Round a matrix ``[out, in]`` to e4m3 times a scale for each so many outputs and inputs, 0 being all.

    Returns:
        The numbers ``[out, in]`` float8_e4m3fn, and the scales ``[blocks, blocks]`` float32.
    """
    (height, width), rows, columns = weight.shape, rows or len(weight), columns or weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (blocks.abs().amax((1, 3), keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scales).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:height, :width].contiguous(), scales[:, 0, :, 0]
