"""Methods and options of ``penstock quantize``. Does not import torch."""

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
    """A quantization method."""

    about: str
    scheme: Scheme
    """Default bits, group size and rotation. The format of sensitive matrices is only used with rotation."""
    file_format: FileFormat = "compressed-tensors"
    bits: tuple[int, ...] = ()
    """Allowed values of ``--bits``; empty: only the bits of ``scheme``."""
    calibrates: bool = True
    """True if the method uses statistics of activations."""
    sequential: bool = False
    """True: calibrate a layer on the outputs of the preceding quantized layers; False: of the original layers."""

    @property
    def format(self) -> Format:
        """Format of all matrices that are not sensitive."""
        return self.scheme.layers


_W4A8 = Scheme(Format(4, 32, 8, rotation=ROTATION), sensitive=SCHEMES["w4a8"].sensitive)
"""``SCHEMES["w4a8"]`` without integer scales (``Format.integer_scales``), which file formats lack."""
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
"""Methods by name. Embedding and language model head are never quantized."""


ROTATIONS = (0, 2, 4, 8, 16, 32, 64)
UNROTATED = ("fp8", "awq", "smoothquant")
"""Methods without rotation: fp8 does not need it; awq and smoothquant scale input channels, which rotation mixes."""


class QuantizeOptions(msgspec.Struct, frozen=True):
    """Options of ``penstock quantize``. They determine the written bytes."""

    method: str
    """Name of the method (``METHODS``)."""
    bits: int = 0
    """Bits of a weight: 4 or 8 with gptq; 0: the default of the method."""
    group_size: int = 0
    """Number of inputs that share a scale, for gptq and methods with 4 bits: a multiple of 8; 0: the default of the
    method; -1: all inputs of a matrix."""
    rotation: int | None = None
    """Block size of the Hadamard rotation of weights and activations, which reduces the error: a power of two up to 64.
    Rotated checkpoints are written as compressed-tensors with a ``transform_config``; rotated 4-bit checkpoints have
    some 8-bit matrices. 0: no rotation and one format for all matrices (gptq: the file format of AutoGPTQ). Default:
    the rotation of the method."""
    act_order: ActOrder = "static"
    """Order in which GPTQ quantizes inputs: ``none``: unpermuted; ``static``: largest activations first, with groups of
    adjacent inputs; ``group``: largest activations first, with groups in that order (``desc_act`` in
    ``config.json``)."""
    smoothing_strength: float = 0.5
    """SmoothQuant's alpha, from 0 to 1: share of the range of activations that is moved into the weights."""
    calib_dataset: str = ""
    """Calibration texts: a file or folder of JSON or Parquet records (text, messages or prompt), or of plain text;
    empty: the built-in texts."""
    calib_texts: tuple[str, ...] = ()
    """Calibration texts to use instead of a data set."""
    calib_size: int = 512
    """Number of calibration samples."""
    calib_seq_len: int = 512
    """Number of tokens per sample."""
    eval_size: int = 16
    """Number of additional samples for the measurements in the report, at most an eighth of all samples."""
    ignore: tuple[str, ...] = ()
    """Matrices that are not quantized: names, suffixes of names, or ``fnmatch`` patterns, such as down_proj or
    'layers.0.*'."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Dtype of the KV cache in the measurements of the report; auto: the model's dtype. It needs no calibration."""
    seed: int = 0
    """Seed of the selection of samples."""

    @property
    def scheme(self) -> Scheme:
        """Format of each quantized matrix. Raises ``PenstockError`` (``invalid``) for invalid options.

        Sensitive matrices have 8 bits only in rotated 4-bit checkpoints, which are written as compressed-tensors. Other
        file formats allow only one format for all matrices.
        """
        method, format = METHODS[self.method], self._format()
        sensitive = method.scheme.sensitive if format.bits == 4 and format.rotation else None
        sensitive = sensitive and replace(sensitive, rotation=format.rotation)
        return Scheme(format, sensitive=sensitive, values_only=method.scheme.values_only)

    @property
    def format(self) -> Format:
        """Format of all matrices that are not sensitive. Raises ``PenstockError`` (``invalid``) for invalid options."""
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
                supported = " or ".join(map(str, choices))
                raise invalid("--bits", f"is {self.bits}; it must be {supported} with {self.method}", choices[0])
        if self.group_size:
            if not method.format.group_size:
                message = f"is {self.group_size}, but {self.method} has one scale per output: remove the option"
                raise invalid("--group-size", message)
            group_size = max(self.group_size, 0)
            if self.group_size < -1 or group_size % 8:
                raise invalid("--group-size", f"is {self.group_size}; it must be a multiple of 8, or -1", 8)
        return replace(method.format, bits=bits, group_size=group_size, rotation=self._rotation(method))

    def _rotation(self, method: Method) -> int:
        """Block size of the rotation. Raises ``PenstockError`` (``invalid``) for unsupported combinations."""
        has_order = self.method == "gptq" and self.act_order == "group"
        if self.rotation is None:
            return 0 if has_order else method.format.rotation
        if self.rotation not in ROTATIONS:
            raise invalid("--rotation", f"is {self.rotation}; it must be a power of two from 2 to 64, or 0", 64)
        if self.rotation and self.method in UNROTATED:
            rotated = ", ".join(name for name in METHODS if name not in UNROTATED)
            message = f"is {self.rotation}; it must be 0 with {self.method}. Methods with rotation: {rotated}"
            raise invalid("--rotation", message)
        if self.rotation and has_order:
            raise invalid(
                "--act-order", f"group is not possible with --rotation {self.rotation}: use static, or rotation 0"
            )
        return self.rotation

    def check(self) -> None:
        """Raise ``PenstockError`` (``invalid``) for a value out of range."""
        if self.method not in METHODS:
            raise invalid("--method", f"is {self.method!r}; it must be one of {', '.join(METHODS)}")
        _ = self.scheme
        for name, least in (("calib_size", 1), ("calib_seq_len", 2), ("eval_size", 1), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                raise invalid(f"--{name.replace('_', '-')}", f"is {value}; it must be at least {least}", least)
        if not (math.isfinite(self.smoothing_strength) and 0 <= self.smoothing_strength <= 1):
            raise invalid("--smoothing-strength", f"is {self.smoothing_strength}; it must be from 0 to 1", 1)
        if self.calib_dataset and not Path(self.calib_dataset).exists():
            advice = "name a file or folder (.jsonl, .parquet or plain text), or omit the option for the built-in texts"
            raise invalid("--calib-dataset", f"{self.calib_dataset} does not exist: {advice}")
