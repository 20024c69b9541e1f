"""AWQ checkpoints (Lin et al., 2023) as AutoAWQ and GPTQModel write them: the layout ``gemm``."""

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
WORD = 8
"""Outputs in a word."""
PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))
"""The outputs of each byte of a word, from its lowest bits on."""


def pack(values: Tensor) -> Tensor:
    """``[rows, out]`` uint8 below 16, as ``qweight`` and ``qzeros`` have them: ``[rows, out / 8]`` int32. Rows are
    inputs or groups."""
    eights = values.T.reshape(-1, WORD, len(values))
    parts = torch.stack([eights[:, low] | eights[:, high] << 4 for low, high in PAIRS], -1)
    return parts.view(torch.int32)[:, :, 0].T.contiguous()


def unpack(words: Tensor) -> Tensor:
    """The inverse of ``pack``; each output's integers are next to each other in memory."""
    eights, rows = words.shape[1], len(words)
    whole = words.T.clone(memory_format=torch.contiguous_format)
    parts = whole.view(torch.uint8).view(eights, rows, 4).transpose(1, 2).contiguous()
    values = torch.empty((eights, WORD, rows), dtype=torch.uint8)
    for place, (low, high) in enumerate(PAIRS):
        torch.bitwise_and(parts[:, place], 15, out=values[:, low])
        torch.bitwise_right_shift(parts[:, place], 4, out=values[:, high])
    return values.flatten(0, 1).T


class AWQ:
    """``CheckpointFormat`` of ``<name>.qweight`` ``[in, out / 8]`` int32, ``qzeros`` ``[groups, out / 8]`` int32, and
    ``scales`` ``[groups, out]``. A weight is its integer less the group's zero point, times the scale."""

    notes: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        layout = str(config.get("version") or config.get("format") or "gemm").lower()
        if layout != "gemm" or config.get("backend") == "llm-awq":
            raise unsupported(f"AWQ in the layout {layout if layout != 'gemm' else 'llm-awq'!r}, other than 'gemm',")
        if (bits := integer(config, "w_bit" if "w_bit" in config else "bits", BITS)) != BITS:
            raise unsupported(f"AWQ in {bits} bits")
        name = "q_group_size" if "q_group_size" in config else "group_size"
        self._format = Format(BITS, group_size(config, 128, name), asymmetric=True)

    def format_of(self, source: TensorSource, name: str) -> Format:
        """As ``CheckpointFormat.format_of``: what the checkpoint has as ``qweight`` is quantized."""
        return self._format if source.has(f"{name}.qweight") else UNQUANTIZED

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """As ``CheckpointFormat.read``."""
        if outputs % WORD:
            raise invalid("model", f"{name} has {outputs} outputs, and AWQ packs them by {WORD}")
        groups = num_groups(inputs, self._format.group_size)
        first, end = rows
        words = slice(first // WORD, -(-end // WORD))
        own = slice(first % WORD, first % WORD + end - first)

        def integers(part: str, count: int) -> Tensor:
            packed = read_tensor(source, f"{name}.{part}", count, outputs // WORD, dtypes=(torch.int32,))
            return unpack(packed[:, words])[:, own].T

        scales = read_tensor(source, f"{name}.scales", groups, outputs, dtypes=FLOATS)[:, first:end].T
        return from_unsigned(integers("qweight", inputs), integers("qzeros", groups), scales, BITS, self._format)
