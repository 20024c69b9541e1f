"""AWQ checkpoints (Lin et al., 2023) in the ``gemm`` layout of AutoAWQ and GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from .checkpoint_format import FLOATS, TensorSource, num_groups, read_tensor
from .config_fields import group_size, integer, unsupported
from .integers import from_unsigned

BITS = 4
PACK_FACTOR = 8
"""Number of outputs packed into one int32."""
BYTE_OUTPUTS = ((0, 2), (4, 6), (1, 3), (5, 7))
"""Indices of the outputs in the low and the high half of each byte of a packed int32, lowest byte first."""


def pack(values: Tensor) -> Tensor:
    """Pack ``[rows, out]`` uint8 below 16 into ``[rows, out / 8]`` int32, the layout of ``qweight`` (rows are inputs)
    and ``qzeros`` (rows are groups)."""
    unpacked = values.T.reshape(-1, PACK_FACTOR, len(values))
    packed = torch.stack([unpacked[:, low] | unpacked[:, high] << 4 for low, high in BYTE_OUTPUTS], -1)
    return packed.view(torch.int32)[:, :, 0].T.contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Inverse of ``pack``. In the result, the integers of an output are contiguous in memory."""
    rows, columns = packed.shape
    as_bytes = packed.T.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    by_byte = as_bytes.view(columns, rows, 4).transpose(1, 2).contiguous()
    values = torch.empty((columns, PACK_FACTOR, rows), dtype=torch.uint8)
    for byte, (low, high) in enumerate(BYTE_OUTPUTS):
        torch.bitwise_and(by_byte[:, byte], 15, out=values[:, low])
        torch.bitwise_right_shift(by_byte[:, byte], 4, out=values[:, high])
    return values.flatten(0, 1).T


class AWQ:
    """``CheckpointFormat`` for AWQ: ``<name>.qweight`` ``[in, out / 8]`` int32, ``qzeros`` ``[groups, out / 8]`` int32,
    and ``scales`` ``[groups, out]``. A weight is ``(integer - zero point) * scale``."""

    notes: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        layout = str(config.get("version") or config.get("format") or "gemm").lower()
        if layout != "gemm" or config.get("backend") == "llm-awq":
            layout = layout if layout != "gemm" else "llm-awq"
            raise unsupported(f"AWQ in the layout {layout!r}; only 'gemm' is supported")
        if (bits := integer(config, "w_bit" if "w_bit" in config else "bits", BITS)) != BITS:
            raise unsupported(f"AWQ in {bits} bits; only {BITS} bits are supported")
        name = "q_group_size" if "q_group_size" in config else "group_size"
        self._format = Format(BITS, group_size(config, 128, name), asymmetric=True)

    def format_of(self, source: TensorSource, name: str) -> Format:
        """See ``CheckpointFormat.format_of``. A matrix with a tensor ``qweight`` is quantized."""
        return self._format if source.has(f"{name}.qweight") else UNQUANTIZED

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """See ``CheckpointFormat.shape``."""
        inputs, packed = source.shape(f"{name}.qweight")
        return packed * PACK_FACTOR, inputs

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """See ``CheckpointFormat.read``."""
        if outputs % PACK_FACTOR:
            raise invalid("model", f"{name} has {outputs} outputs; AWQ requires a multiple of {PACK_FACTOR}")
        groups = num_groups(inputs, self._format.group_size)
        first, end = rows
        columns = slice(first // PACK_FACTOR, -(-end // PACK_FACTOR))
        unpacked_columns = slice(first % PACK_FACTOR, first % PACK_FACTOR + end - first)

        def integers(part: str, count: int) -> Tensor:
            packed = read_tensor(source, f"{name}.{part}", count, outputs // PACK_FACTOR, dtypes=(torch.int32,))
            return unpack(packed[:, columns])[:, unpacked_columns].T

        scales = read_tensor(source, f"{name}.scales", groups, outputs, dtypes=FLOATS)[:, first:end].T
        return from_unsigned(integers("qweight", inputs), integers("qzeros", groups), scales, BITS, self._format)
