"""bitsandbytes checkpoints: nf4 and fp4 (QLoRA, Dettmers et al., 2023), and int8 (LLM.int8(), 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from .checkpoint_format import FLOATS, TensorSource, read_tensor
from .config_fields import unsupported

BLOCK = 64
"""Number of weights per scale, for ``Format``. ``read`` uses the actual ``blocksize`` of the checkpoint."""
MAX_BLOCK = 2**16
MAX_STATE = 2**16
"""Maximum size of an encoded ``_State`` in bytes."""
STORAGE = (torch.uint8, torch.int8, *FLOATS, torch.float64)
"""Possible dtypes of packed 4-bit weights (``bnb_4bit_quant_storage``); each byte contains two weights."""
INT8_STEP = 7.874015718698502e-3
"""1 / 127, rounded as in bitsandbytes."""


class _State(msgspec.Struct, frozen=True):
    """Quantization state of a 4-bit matrix: the JSON in the tensor ``quant_state.bitsandbytes__nf4`` (or ``fp4``)."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    shape: tuple[int, ...]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


class BitsAndBytes:
    """``CheckpointFormat`` for bitsandbytes in 4 or 8 bits.

    4 bits: each byte of ``<name>.weight`` has two weights, the first in its upper half, as indices into
    ``weight.quant_map`` ``[16]``. Consecutive weights of the flattened matrix form a block, which shares a scale of
    ``weight.absmax``. The scales may also be quantized (double quantization).

    8 bits: ``<name>.weight`` is ``[out, in]`` int8, and ``SCB`` is the largest magnitude of each output.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        is_4bit, is_8bit = (bool(config.get(f"load_in_{n}bit") or config.get(f"_load_in_{n}bit")) for n in (4, 8))
        if is_4bit == is_8bit:
            found = f"load_in_4bit is {is_4bit} and load_in_8bit is {is_8bit}"
            raise invalid("model", f"config.json must set exactly one of load_in_4bit and load_in_8bit; {found}")
        if is_4bit and (kind := config.get("bnb_4bit_quant_type") or "fp4") not in ("nf4", "fp4"):
            raise unsupported(f"bitsandbytes in {kind!r:.40}; supported are 'nf4' and 'fp4'")
        note = "llm_int8_threshold is ignored: outliers of activations are not multiplied separately"
        self.notes: Sequence[str] = () if is_4bit else (note,)

    def format_of(self, source: TensorSource, name: str) -> Format:
        """See ``CheckpointFormat.format_of``. A matrix with a tensor of scales is quantized."""
        if source.has(f"{name}.SCB"):
            return Format(8)
        return Format(4, BLOCK, floating=True) if source.has(f"{name}.weight.absmax") else UNQUANTIZED

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """See ``CheckpointFormat.shape``."""
        if source.has(f"{name}.SCB"):
            outputs, inputs = source.shape(f"{name}.weight")
        else:
            outputs, inputs = _read_state(source, f"{name}.weight").shape
        return outputs, inputs

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight | Tensor:
        """See ``CheckpointFormat.read``."""
        if not source.has(f"{name}.SCB"):
            return _read_4bit(source, f"{name}.weight", outputs, inputs, rows)
        if source.has(f"{name}.weight_format"):
            shape = source.shape(f"{name}.weight_format")
            if int(read_tensor(source, f"{name}.weight_format", *shape, dtypes=(torch.uint8,)).sum()):
                raise unsupported("bitsandbytes with tiled weights (weight_format is not 0)")
        values = read_tensor(source, f"{name}.weight", outputs, inputs, dtypes=(torch.int8,), rows=rows)
        largest = read_tensor(source, f"{name}.SCB", outputs, dtypes=FLOATS, rows=rows).float()
        return QuantizedWeight(values, (largest * INT8_STEP)[:, None], Format(8))


def _read_4bit(source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> Tensor:
    """Read and dequantize outputs ``rows`` of a 4-bit matrix. Blocks may begin and end within a row, so the blocks that
    contain these rows are dequantized, then cut to size."""
    state, count = _read_state(source, name), outputs * inputs
    if state.shape != (outputs, inputs):
        raise invalid("model", f"{name} has shape {state.shape}; config.json requires {(outputs, inputs)}")
    block = state.blocksize
    first, end = (row * inputs for row in rows)
    blocks = slice(first // block, -(-end // block))
    start, stop = blocks.start * block, min(blocks.stop * block, count)
    shape = source.shape(name)
    packed = read_tensor(source, name, *shape, dtypes=STORAGE).contiguous().view(-1).view(torch.uint8)
    if len(packed) != -(-count // 2):
        raise invalid("model", f"tensor {name} has {len(packed)} bytes; {count} 4-bit weights require {-(-count // 2)}")
    packed = packed[start // 2 : -(-stop // 2)]
    table = read_tensor(source, f"{name}.quant_map", 16, dtypes=FLOATS).float()
    values = table[torch.stack((packed >> 4, packed & 15), -1).flatten().long()][: stop - start]
    scales = _read_scales(source, name, -(-count // block), state)[blocks]
    values *= scales.repeat_interleave(block)[: len(values)]
    return values[first - start : end - start].view(-1, inputs)


def _read_scales(source: TensorSource, name: str, count: int, state: _State) -> Tensor:
    """Read the scale of each block, ``[count]`` float32. With double quantization, a scale is an entry of
    ``nested_quant_map`` times the scale of its nested block, plus the offset of all scales."""
    if not source.has(f"{name}.nested_absmax"):
        return read_tensor(source, f"{name}.absmax", count, dtypes=FLOATS).float()
    block = _checked_block(name, state.nested_blocksize)
    indices = read_tensor(source, f"{name}.absmax", count, dtypes=(torch.uint8,))
    table = read_tensor(source, f"{name}.nested_quant_map", 256, dtypes=FLOATS).float()
    scales = read_tensor(source, f"{name}.nested_absmax", -(-count // block), dtypes=FLOATS).float()
    return table[indices.long()] * scales.repeat_interleave(block)[:count] + state.nested_offset


def _read_state(source: TensorSource, name: str) -> _State:
    kinds = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    tensor = next(filter(source.has, kinds), kinds[0])
    shape = source.shape(tensor)
    if len(shape) != 1 or shape[0] > MAX_STATE:
        raise invalid("model", f"tensor {tensor} has shape {shape}; it must be a vector of at most {MAX_STATE} bytes")
    text = read_tensor(source, tensor, *shape, dtypes=(torch.uint8,))
    try:
        state = msgspec.json.decode(bytes(text.tolist()), type=_State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("model", f"tensor {tensor} is damaged ({error}): download the checkpoint again") from error
    _checked_block(name, state.blocksize)
    return state


def _checked_block(name: str, size: int) -> int:
    if not 2 <= size <= MAX_BLOCK or size % 2:
        raise invalid("model", f"{name} has block size {size}; it must be even, and from 2 to {MAX_BLOCK}")
    return size
