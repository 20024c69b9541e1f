"""Checkpoints of bitsandbytes: nf4 and fp4 (QLoRA, Dettmers et al., 2023), and 8 bits (LLM.int8(), 2022)."""

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
"""The usual number of weights that share a scale; the checkpoint names its own."""
MAX_BLOCK = 2**16
MAX_STATE = 2**16
"""Bytes of a ``_State``."""
STORAGE = (torch.uint8, torch.int8, *FLOATS, torch.float64)
"""Dtypes whose bytes may hold two weights each (``bnb_4bit_quant_storage``)."""
INT8_STEP = 7.874015718698502e-3
"""1 / 127 as bitsandbytes rounds it."""


class _State(msgspec.Struct, frozen=True):
    """What is not a tensor of a matrix in 4 bits: JSON in the bytes of ``quant_state.bitsandbytes__nf4``."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    shape: tuple[int, ...]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


class BitsAndBytes:
    """``CheckpointFormat`` of 4 or 8 bits.

    In 4 bits a byte of ``<name>.weight`` has two weights, the first in its upper half: places in ``weight.quant_map``
    ``[16]``. A block of weights, in the order of the flat matrix, shares a scale of ``weight.absmax``, which may be
    quantized itself. In 8 bits ``<name>.weight`` is ``[out, in]`` int8, and ``SCB`` the largest magnitude of each
    output.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        four, eight = (bool(config.get(f"load_in_{bits}bit") or config.get(f"_load_in_{bits}bit")) for bits in (4, 8))
        if four == eight:
            raise invalid("model", "config.json must name one of load_in_4bit and load_in_8bit")
        if four and (kind := config.get("bnb_4bit_quant_type") or "fp4") not in ("nf4", "fp4"):
            raise unsupported(f"bitsandbytes in {kind!r:.40}, other than nf4 and fp4,")
        self.notes: Sequence[str] = ("outliers of activations (llm_int8_threshold) are multiplied as all others are",)
        if four:
            self.notes = ()

    def format_of(self, source: TensorSource, name: str) -> Format:
        """As ``CheckpointFormat.format_of``: what the checkpoint has scales of is quantized."""
        if source.has(f"{name}.SCB"):
            return Format(8)
        return Format(4, BLOCK, floating=True) if source.has(f"{name}.weight.absmax") else UNQUANTIZED

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight | Tensor:
        """As ``CheckpointFormat.read``."""
        if not source.has(f"{name}.SCB"):
            return _read_4bit(source, f"{name}.weight", outputs, inputs, rows)
        if source.has(f"{name}.weight_format"):
            shape = source.shape(f"{name}.weight_format")
            if int(read_tensor(source, f"{name}.weight_format", *shape, dtypes=(torch.uint8,)).sum()):
                raise unsupported("bitsandbytes with weights in tiles (weight_format)")
        values = read_tensor(source, f"{name}.weight", outputs, inputs, dtypes=(torch.int8,), rows=rows)
        largest = read_tensor(source, f"{name}.SCB", outputs, dtypes=FLOATS, rows=rows).float()
        return QuantizedWeight(values, (largest * INT8_STEP)[:, None], Format(8))


def _read_4bit(source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> Tensor:
    """Outputs of a matrix in 4 bits, dequantized: whole blocks are, and what they have too many is cut off."""
    state, count = _read_state(source, name), outputs * inputs
    if state.shape != (outputs, inputs):
        raise invalid("model", f"{name} was quantized as {state.shape}, config.json wants {(outputs, inputs)}")
    block = state.blocksize
    first, end = (row * inputs for row in rows)
    blocks = slice(first // block, -(-end // block))
    start, stop = blocks.start * block, min(blocks.stop * block, count)
    shape = source.shape(name)
    packed = read_tensor(source, name, *shape, dtypes=STORAGE).contiguous().view(-1).view(torch.uint8)
    if len(packed) != -(-count // 2):
        raise invalid("model", f"tensor {name} has {len(packed)} bytes, which are not {count} weights of 4 bits")
    packed = packed[start // 2 : -(-stop // 2)]
    table = read_tensor(source, f"{name}.quant_map", 16, dtypes=FLOATS).float()
    values = table[torch.stack((packed >> 4, packed & 15), -1).flatten().long()][: stop - start]
    scales = _read_scales(source, name, -(-count // block), state)[blocks]
    values *= scales.repeat_interleave(block)[: len(values)]
    return values[first - start : end - start].view(-1, inputs)


def _read_scales(source: TensorSource, name: str, count: int, state: _State) -> Tensor:
    """The scale of each block, ``[count]`` float32. Quantized ones (double quantization) are places in a table, times a
    scale a block of theirs, plus their mean."""
    if not source.has(f"{name}.nested_absmax"):
        return read_tensor(source, f"{name}.absmax", count, dtypes=FLOATS).float()
    block = _checked_block(name, state.nested_blocksize)
    places = read_tensor(source, f"{name}.absmax", count, dtypes=(torch.uint8,))
    table = read_tensor(source, f"{name}.nested_quant_map", 256, dtypes=FLOATS).float()
    scales = read_tensor(source, f"{name}.nested_absmax", -(-count // block), dtypes=FLOATS).float()
    return table[places.long()] * scales.repeat_interleave(block)[:count] + state.nested_offset


def _read_state(source: TensorSource, name: str) -> _State:
    kinds = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    tensor = next(filter(source.has, kinds), kinds[0])
    shape = source.shape(tensor)
    if len(shape) != 1 or shape[0] > MAX_STATE:
        raise invalid("model", f"tensor {tensor} has shape {shape}, and is no description of {name}")
    text = read_tensor(source, tensor, *shape, dtypes=(torch.uint8,))
    try:
        state = msgspec.json.decode(bytes(text.tolist()), type=_State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("model", f"tensor {tensor} is damaged ({error})") from error
    _checked_block(name, state.blocksize)
    return state


def _checked_block(name: str, size: int) -> int:
    if not 2 <= size <= MAX_BLOCK or size % 2:
        raise invalid("model", f"{name} was quantized in blocks of {size} weights")
    return size
