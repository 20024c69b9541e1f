"""What ``penstock quantize`` can be told: methods, and options with their defaults. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from penstock.core.errors import invalid
from penstock.core.quantization import ROTATION, SCHEMES, Format, Scheme

FileFormat = Literal["awq", "compressed-tensors", "gptq"]
"""``quant_method`` of the written ``config.json``."""
ActOrder = Literal["none", "static", "group"]
KVCacheDtype = Literal["auto", "int8", "fp8"]


@dataclass(frozen=True)
class Method:
    """How matrices are quantized and written."""

    about: str
    scheme: Scheme
    """With the default number of bits, group size and rotation. Sensitive matrices have another format only where they
    are rotated."""
    file_format: FileFormat = "compressed-tensors"
    bits: tuple[int, ...] = ()
    """Numbers of bits to choose from; empty where there is no choice."""
    calibrates: bool = True
    """Whether it looks at activations."""
    sequential: bool = False
    """Whether a layer is calibrated on what the quantized layers before it give, in place of the original ones."""

    @property
    def format(self) -> Format:
        """The format of all matrices but sensitive ones."""
        return self.scheme.layers


_W4A8 = Scheme(Format(4, 32, 8, rotation=ROTATION), sensitive=SCHEMES["w4a8"].sensitive)
"""Scheme of written checkpoints: file formats have no integer scales (``Format.integer_scales``)."""
_GPTQ = Scheme(Format(4, 64, rotation=ROTATION), sensitive=Format(8, rotation=ROTATION), values_only=True)
METHODS: dict[str, Method] = {
    "wint8": Method("8-bit weights, rounded to nearest", SCHEMES["wint8"], calibrates=False),
    "wint4": Method("4-bit weights, rounded to nearest", SCHEMES["wint4"], calibrates=False),
    "w8a8": Method("8-bit weights and activations, rounded", SCHEMES["w8a8"], calibrates=False),
    "w4a8": Method("4-bit weights and 8-bit activations, rounded", _W4A8, calibrates=False),
    "fp8": Method("8-bit floating-point weights and activations", SCHEMES["fp8"], calibrates=False),
    "awq": Method("4-bit weights, scales and clipping searched", Scheme(Format(4, 128, asymmetric=True)), "awq"),
    "gptq": Method("4- or 8-bit weights, errors compensated", _GPTQ, "gptq", (4, 8), sequential=True),
    "smoothquant": Method("8-bit weights and smoothed activations", Scheme(Format(8, activation_bits=8))),
}
"""By name. Embedding and language model head are never quantized."""


ROTATIONS = (0, 2, 4, 8, 16, 32, 64)
UNROTATED = ("fp8", "awq", "smoothquant")
"""Methods whose weights are not rotated: floating-point numbers, and those that scale inputs, which rotations mix."""


class QuantizeOptions(msgspec.Struct, frozen=True):
    """Options of a quantization. All of them decide the bytes that are written."""

    method: str
    """A name of ``METHODS``."""
    bits: int = 0
    """Bits of a weight, where the method has a choice; 0 is its first."""
    group_size: int = 0
    """Inputs that share a scale, in methods of 4 bits and ``gptq``; 0 is the method's, -1 is all of them."""
    rotation: int | None = None
    """Inputs of the Hadamard blocks by which weights and activations are rotated, which loses less, a power of two up
    to 64; None is the method's. Rotated integers are written as compressed-tensors with a ``transform_config`` and, in
    4 bits, some matrices in 8. 0: not rotated, one format for all matrices, with gptq as AutoGPTQ writes it."""
    act_order: ActOrder = "static"
    """Order in which GPTQ quantizes inputs: as they are, or largest activations first, with groups of neighbours
    (``static``) or of inputs that follow each other in that order (``group``: ``desc_act`` in ``config.json``)."""
    smoothing_strength: float = 0.5
    """How much of the activations' range SmoothQuant moves to the weights (alpha in the paper); 0 leaves activations as
    they are."""
    calib_dataset: str = ""
    """File or folder of texts: JSON or Parquet with text, messages or prompt, or plain text; empty is the built-in
    one."""
    calib_texts: tuple[str, ...] = ()
    """Texts in place of a data set."""
    calib_size: int = 512
    """Samples to calibrate on."""
    calib_seq_len: int = 512
    """Tokens of a sample."""
    eval_size: int = 16
    """Further samples, on which the report measures, an eighth of all at most."""
    ignore: tuple[str, ...] = ()
    """Matrices that are not quantized: ends of their names, or patterns of them (``fnmatch``), as down_proj or
    'layers.0.*'."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Dtype of the KV cache that the report measures with; needs no calibration."""
    seed: int = 0
    """Seed of the choice of samples."""

    @property
    def scheme(self) -> Scheme:
        """The format of each quantized matrix. Raises ``PenstockError`` (``invalid``) for options that do not fit.

        Sensitive matrices have 8 bits in rotated checkpoints of 4 bits alone, which are written as compressed-tensors.
        Other file formats allow one format for all matrices.
        """
        method, format = METHODS[self.method], self._format()
        sensitive = method.scheme.sensitive if format.bits == 4 and format.rotation else None
        sensitive = sensitive and replace(sensitive, rotation=format.rotation)
        return Scheme(format, sensitive=sensitive, values_only=method.scheme.values_only)

    @property
    def format(self) -> Format:
        """The format of all matrices but sensitive ones; raises as ``scheme``."""
        return self.scheme.layers

    @property
    def file_format(self) -> FileFormat:
        """``quant_method`` of the written checkpoint."""
        return "compressed-tensors" if self.format.rotation else METHODS[self.method].file_format

    def _format(self) -> Format:
        method = METHODS[self.method]
        bits, group_size = method.format.bits, method.format.group_size
        if self.bits:
            bits = self.bits
            choices = method.bits or (method.format.bits,)
            if bits not in choices:
                raise invalid("--bits", f"{self.method} has {' or '.join(map(str, choices))}", choices[0])
        if self.group_size:
            if not method.format.group_size:
                raise invalid("--group-size", f"{self.method} has one scale an output: leave it out")
            group_size = max(self.group_size, 0)
            if self.group_size < -1 or group_size % 8:
                raise invalid("--group-size", f"must be a multiple of 8, or -1, is {self.group_size}", 8)
        return replace(method.format, bits=bits, group_size=group_size, rotation=self._rotation(method))

    def _rotation(self, method: Method) -> int:
        """Inputs of a rotated block. Raises ``PenstockError`` (``invalid``) for what cannot be rotated."""
        has_order = self.method == "gptq" and self.act_order == "group"
        if self.rotation is None:
            return 0 if has_order else method.format.rotation
        if self.rotation not in ROTATIONS:
            raise invalid("--rotation", f"must be a power of two from 2 to 64, or 0, is {self.rotation}", 64)
        if self.rotation and self.method in UNROTATED:
            raise invalid("--rotation", f"{self.method} has none: take gptq or a method that rounds to integers")
        if self.rotation and has_order:
            raise invalid("--act-order", "group is none of rotated weights: take static")
        return self.rotation

    def check(self) -> None:
        """Raises ``PenstockError`` (``invalid``) for a value out of its range."""
        if self.method not in METHODS:
            raise invalid("--method", f"must be one of {', '.join(METHODS)}, is {self.method!r}")
        _ = self.scheme
        for name, least in (("calib_size", 1), ("calib_seq_len", 2), ("eval_size", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise invalid(f"--{name.replace('_', '-')}", f"must be at least {least}, is {value}", least)
        if not (math.isfinite(self.smoothing_strength) and 0 <= self.smoothing_strength <= 1):
            raise invalid("--smoothing-strength", f"must be from 0 to 1, is {self.smoothing_strength}", 1)
        if self.calib_dataset and not Path(self.calib_dataset).exists():
            advice = "give a file or folder (.jsonl, .parquet or plain text), or leave it out for the built-in texts"
            raise invalid("--calib-dataset", f"there is no {self.calib_dataset}: {advice}")
