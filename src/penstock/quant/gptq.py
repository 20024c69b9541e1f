"""GPTQ checkpoints (Frantar et al., 2022) as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""The word that has 1 everywhere."""
CHANGES = ("adapter", "rotation")
"""Fields that change what a checkpoint's matrices mean."""


def pack(values: Tensor, bits: int) -> Tensor:
    """``[out, in]`` uint8 as ``qweight``: ``[in * bits / 32, out]`` int32."""
    return pack_bits(values, bits).T.contiguous()


def unpack(words: Tensor, bits: int, inputs: int) -> Tensor:
    """The inverse of ``pack``."""
    return unpack_bits(words.T, bits, inputs)


def pack_zeros(zeros: Tensor, bits: int, version: int = 1) -> Tensor:
    """``[groups, out]`` uint8 as ``qzeros``: ``[groups, out * bits / 32]`` int32. Version 1 has 1 less: words less the
    word of ones, so that a zero point of 0 borrows from the next; or numbers less 1 where they cross words (3 bits)."""
    if version == 2:
        return pack_bits(zeros, bits)
    if 32 % bits:
        return pack_bits((zeros - 1) & (2**bits - 1), bits)
    return pack_bits(zeros, bits) - ONES[bits]


def unpack_zeros(words: Tensor, bits: int, outputs: int, version: int = 1) -> Tensor:
    """The inverse of ``pack_zeros``."""
    if version == 2:
        return unpack_bits(words, bits, outputs)
    if 32 % bits:
        zeros: Tensor = unpack_bits(words, bits, outputs) + 1
        return zeros.bitwise_and_(2**bits - 1)
    return unpack_bits(words + ONES[bits], bits, outputs)


@dataclass(frozen=True)
class _Settings:
    """How a matrix is quantized."""

    bits: int
    group_size: int
    symmetric: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> _Settings:
        if (bits := integer(config, "bits")) not in BITS:
            raise unsupported(f"GPTQ in {bits} bits")
        return cls(bits, group_size(config, 128), bool(config.get("sym", True)))

    @property
    def format(self) -> Format:
        """In 4 bits where there are fewer."""
        return Format(max(self.bits, 4), self.group_size, asymmetric=not self.symmetric)


class GPTQ:
    """``CheckpointFormat`` of ``<name>.qweight`` ``[in * bits / 32, out]`` int32, ``qzeros``
    ``[groups, out * bits / 32]`` int32, ``scales`` ``[groups, out]``, and perhaps ``g_idx`` ``[in]``, the group of each
    input. A weight is its integer less the group's zero point, times the scale."""

    notes: Sequence[str] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
            raise unsupported(f"GPTQ in the layout {layout!r}, other than 'gptq' and 'gptq_v2',")
        if (word := config.get("pack_dtype") or "int32") != "int32":
            raise unsupported(f"GPTQ packed into words of {word}, other than int32,")
        if changed := [field for field in CHANGES if config.get(field)]:
            raise unsupported(f"GPTQ with {changed[0]} {config[changed[0]]!r:.60}")
        self._version = 2 if layout == "gptq_v2" else 1
        self._settings = _Settings.read(config)
        self._overrides: list[tuple[re.Pattern[str], _Settings]] = []
        """Of modules whose name matches; the first counts. What is not quantized (``-:``) has no ``qweight``."""
        for text, changes in mapping(config.get("dynamic") or {}, "dynamic").items():
            if not text.startswith("-:"):
                settings = _Settings.read({**config, **mapping(changes, "dynamic")})
                self._overrides.append((pattern(text.removeprefix("+:")), settings))

    def format_of(self, source: TensorSource, name: str) -> Format:
        """As ``CheckpointFormat.format_of``: what the checkpoint has as ``qweight`` is quantized."""
        return self._settings_of(name).format if source.has(f"{name}.qweight") else UNQUANTIZED

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """As ``CheckpointFormat.read``."""
        settings, (first, end) = self._settings_of(name), rows
        bits, groups = settings.bits, num_groups(inputs, settings.group_size)
        if inputs * bits % 32 or outputs * bits % 32:
            raise invalid("model", f"{name} is [{outputs}, {inputs}], which {bits} bits do not fill words with")

        def integers(part: str, *shape: int) -> Tensor:
            return read_tensor(source, f"{name}.{part}", *shape, dtypes=(torch.int32,))

        values = unpack(integers("qweight", inputs * bits // 32, outputs)[:, first:end], bits, inputs)
        zeros = unpack_zeros(integers("qzeros", groups, outputs * bits // 32), bits, outputs, self._version)
        if settings.symmetric and bool((zeros != 1 << (bits - 1)).any()):
            raise invalid("model", f"{name} has zero points, although config.json says that it is symmetric (sym)")
        scales = read_tensor(source, f"{name}.scales", groups, outputs, dtypes=FLOATS)[:, first:end].T
        own = None if settings.symmetric else zeros[:, first:end].T
        return from_unsigned(values, own, scales, bits, settings.format, self._order(source, name, inputs, settings))

    def _order(self, source: TensorSource, name: str, inputs: int, settings: _Settings) -> Tensor | None:
        """The order of inputs (act-order)."""
        if not source.has(f"{name}.g_idx"):
            return None
        groups = read_tensor(source, f"{name}.g_idx", inputs, dtypes=(torch.int32, torch.int64))
        return input_order(groups, settings.group_size, f"{name}.g_idx")

    def _settings_of(self, name: str) -> _Settings:
        return next((settings for found, settings in self._overrides if found.match(name)), self._settings)
