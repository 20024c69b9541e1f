"""GPTQ checkpoints (Frantar et al., 2022) of AutoGPTQ and GPTQModel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from .checkpoint_format import FLOATS, TensorSource, num_groups, read_tensor
from .config_fields import group_size, integer, mapping, pattern, unsupported
from .integers import from_unsigned, input_order, pack_bits, unpack_bits

BITS = (2, 3, 4, 8)
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""An int32 in which every packed integer is 1, by bits per integer."""
UNSUPPORTED_FIELDS = ("adapter", "rotation")
"""Fields that change the meaning of a checkpoint's matrices."""


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack ``[out, in]`` uint8 into ``[in * bits / 32, out]`` int32, the layout of ``qweight``."""
    return pack_bits(values, bits).T.contiguous()


def unpack(packed: Tensor, bits: int, inputs: int) -> Tensor:
    """Inverse of ``pack``: ``[in * bits / 32, out]`` int32 to ``[out, in]`` uint8."""
    return unpack_bits(packed.T, bits, inputs)


def pack_zeros(zeros: Tensor, bits: int, version: int = 1) -> Tensor:
    """Pack ``[groups, out]`` uint8 into ``[groups, out * bits / 32]`` int32, the layout of ``qzeros``.

    Version 1 stores zero points minus 1. It subtracts from the packed int32, so that a zero point of 0 borrows from the
    next zero point. With 3 bits, integers straddle int32 boundaries, and each zero point is decremented separately.
    """
    if version == 2:
        return pack_bits(zeros, bits)
    if 32 % bits:
        return pack_bits((zeros - 1) & (2**bits - 1), bits)
    return pack_bits(zeros, bits) - ONES[bits]


def unpack_zeros(packed: Tensor, bits: int, outputs: int, version: int = 1) -> Tensor:
    """Inverse of ``pack_zeros``: ``[groups, out * bits / 32]`` int32 to ``[groups, out]`` uint8."""
    if version == 2:
        return unpack_bits(packed, bits, outputs)
    if 32 % bits:
        zeros: Tensor = unpack_bits(packed, bits, outputs) + 1
        return zeros.bitwise_and_(2**bits - 1)
    return unpack_bits(packed + ONES[bits], bits, outputs)


@dataclass(frozen=True)
class _Settings:
    """Quantization settings of a matrix."""

    bits: int
    group_size: int
    symmetric: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _Settings:
        if (bits := integer(config, "bits")) not in BITS:
            raise unsupported(f"GPTQ in {bits} bits; supported are {', '.join(map(str, BITS))}")
        return cls(bits, group_size(config, 128), bool(config.get("sym", True)))

    @property
    def format(self) -> Format:
        """Format in memory: integers of 2 and 3 bits are widened to 4 bits."""
        return Format(max(self.bits, 4), self.group_size, asymmetric=not self.symmetric)


class GPTQ:
    """``CheckpointFormat`` for GPTQ: ``<name>.qweight`` ``[in * bits / 32, out]`` int32, ``qzeros``
    ``[groups, out * bits / 32]`` int32, ``scales`` ``[groups, out]``, and optionally ``g_idx`` ``[in]``, the group of
    each input. A weight is ``(integer - zero point) * scale``."""

    notes: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
            raise unsupported(f"GPTQ in the layout {layout!r}; supported are 'gptq' and 'gptq_v2'")
        if (dtype := config.get("pack_dtype") or "int32") != "int32":
            raise unsupported(f"GPTQ with pack_dtype {dtype}; only int32 is supported")
        if fields := [field for field in UNSUPPORTED_FIELDS if config.get(field)]:
            raise unsupported(f"GPTQ with {fields[0]} {config[fields[0]]!r:.60}")
        self._version = 2 if layout == "gptq_v2" else 1
        self._settings = _Settings.read(config)
        self._overrides: list[tuple[re.Pattern[str], _Settings]] = []
        """Pattern of module names → settings; the first match applies. Modules excluded by ``-:`` need no entry: they
        have no ``qweight``."""
        for text, changes in mapping(config.get("dynamic") or {}, "dynamic").items():
            if not text.startswith("-:"):
                settings = _Settings.read({**config, **mapping(changes, "dynamic")})
                self._overrides.append((pattern(text.removeprefix("+:")), settings))

    def format_of(self, source: TensorSource, name: str) -> Format:
        """See ``CheckpointFormat.format_of``. A matrix with a tensor ``qweight`` is quantized."""
        return self._settings_of(name).format if source.has(f"{name}.qweight") else UNQUANTIZED

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """See ``CheckpointFormat.shape``."""
        packed, outputs = source.shape(f"{name}.qweight")
        return outputs, packed * 32 // self._settings_of(name).bits

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """See ``CheckpointFormat.read``."""
        settings, (first, end) = self._settings_of(name), rows
        bits, groups = settings.bits, num_groups(inputs, settings.group_size)
        if inputs * bits % 32 or outputs * bits % 32:
            multiple = 32 // gcd(bits, 32)
            raise invalid("model", f"{name} is [{outputs}, {inputs}]; {bits}-bit GPTQ requires multiples of {multiple}")

        def integers(part: str, *shape: int) -> Tensor:
            return read_tensor(source, f"{name}.{part}", *shape, dtypes=(torch.int32,))

        values = unpack(integers("qweight", inputs * bits // 32, outputs)[:, first:end], bits, inputs)
        zeros = unpack_zeros(integers("qzeros", groups, outputs * bits // 32), bits, outputs, self._version)
        if settings.symmetric and bool((zeros != 1 << (bits - 1)).any()):
            middle = 1 << (bits - 1)
            raise invalid("model", f"{name} has zero points other than {middle}; config.json must not have sym: true")
        scales = read_tensor(source, f"{name}.scales", groups, outputs, dtypes=FLOATS)[:, first:end].T
        zero_points = None if settings.symmetric else zeros[:, first:end].T
        order = self._order(source, name, inputs, settings)
        return from_unsigned(values, zero_points, scales, bits, settings.format, order)

    def _order(self, source: TensorSource, name: str, inputs: int, settings: _Settings) -> Tensor | None:
        """Read the order of inputs (act-order); None: the inputs are in their original order."""
        if not source.has(f"{name}.g_idx"):
            return None
        groups = read_tensor(source, f"{name}.g_idx", inputs, dtypes=(torch.int32, torch.int64))
        return input_order(groups, settings.group_size, f"{name}.g_idx")

    def _settings_of(self, name: str) -> _Settings:
        return next((settings for regex, settings in self._overrides if regex.match(name)), self._settings)
