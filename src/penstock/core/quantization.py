"""Quantization formats of weights and activations, and the schemes that ``--quantization`` names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd
from typing import Literal, get_args


@dataclass(frozen=True)
class Format:
    """Quantization format of a matrix ``[outputs, inputs]``. The default is unquantized.

    Quantization at load rounds to nearest. 8-bit integers lie in [-127, 127], scaled so that a group's largest
    magnitude is 127; 4-bit integers lie in [-8, 7], with the scale of least squared error (``ops.scale_search``); the
    largest magnitude of 8-bit floating-point numbers is ``MAX_FP8``. Integers of checkpoints may also be -128.
    """

    bits: int = 0
    """Bits per weight: 8 or 4; 0: unquantized."""
    group_size: int = 0
    """Number of inputs that share a scale, a multiple of 8; 0: one scale per output (per channel)."""
    activation_bits: int = 0
    """8: activations are quantized dynamically, with one scale per row (token); with ``activation_groups``, or with
    floating-point weights in groups, one scale per row and group. 0: activations are not quantized."""
    floating: bool = False
    """Weights are floating-point numbers instead of integers: 8 bits are e4m3, 4 bits in groups of ``MX_BLOCK`` are
    e2m1 (mxfp4, from checkpoints only). Other 4-bit formats (nf4, fp4) are dequantized at load."""
    rows_per_scale: int = 1
    """Number of outputs that share a scale; 0: one scale per matrix (per tensor). 1 unless ``floating``."""
    asymmetric: bool = False
    """Groups have an offset: a weight is its integer times the scale plus the offset (zero points of AWQ and GPTQ,
    minima of GGUF). From checkpoints only; quantization at load is symmetric."""
    integer_scales: bool = False
    """A group's scale is an integer from -15 to 15 times the scale of its output, in groups of 8, 16 or 32 inputs. A
    weight is then an 8-bit integer times the scale of its output, so that products with 8-bit activations are sums of
    integers (QServe, Lin et al., 2024)."""
    activation_groups: bool = False
    """8-bit activations have one scale per row and group instead of one per row, so that an outlier costs precision in
    its group only."""
    rotation: int = 0
    """Block size, in inputs, of the Hadamard rotation of weights and activations before rounding (``ops.hadamard``), a
    power of two up to 64; 0: not rotated."""

    def __post_init__(self) -> None:
        if self.group_size % 8:
            raise ValueError(f"group_size {self.group_size} is not a multiple of 8")
        if self.floating and self.bits not in (4, 8):
            raise ValueError(f"floating-point weights must have 4 or 8 bits, not {self.bits}")
        if self.rows_per_scale != 1 and not self.floating:
            raise ValueError(f"rows_per_scale must be 1 for integer weights, is {self.rows_per_scale}")
        if self.asymmetric and (self.floating or not self.bits):
            raise ValueError("asymmetric requires integer weights")
        if self.integer_scales and (self.bits, self.activation_bits, self.floating or self.asymmetric) != (4, 8, False):
            raise ValueError("integer_scales requires symmetric 4-bit integer weights and 8-bit activations")
        if self.activation_groups and (self.activation_bits, bool(self.group_size), self.floating) != (8, True, False):
            raise ValueError("activation_groups requires 8-bit activations and integer weights in groups")
        if self.integer_scales and self.group_size not in (8, 16, 32):
            raise ValueError(f"integer_scales requires a group_size of 8, 16 or 32, not {self.group_size}")
        if self.rotation not in (0, 1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"rotation {self.rotation} is not a power of two up to 64")
        if self.rotation and (self.floating or not self.bits):
            raise ValueError("rotation requires integer weights")

    def __str__(self) -> str:
        """Description for the log, such as ``int4 in groups of 128 with offsets``."""
        if not self.bits:
            return "unquantized weights"
        text = f"{'fp' if self.floating else 'int'}{self.bits}"
        if self.rows_per_scale > 1:
            text += f" in blocks of {self.rows_per_scale} by {self.group_size}"
        elif self.group_size:
            text += f" in groups of {self.group_size}"
        text += " with integer scales" if self.integer_scales else ""
        text += " with offsets" if self.asymmetric else ""
        text += " and activations in 8 bits" if self.activation_bits else ""
        text += " by groups" if self.activation_groups else ""
        return text + (f", rotated by {self.rotation}" if self.rotation else "")

    def rotation_block(self, inputs: int) -> int:
        """Block size of the rotation in a matrix with ``inputs`` columns: the largest power of two up to ``rotation``
        that divides ``inputs``; 1 if not rotated."""
        return gcd(self.rotation or 1, inputs)

    @property
    def is_mxfp4(self) -> bool:
        """True for mxfp4 weights, which kernels multiply without dequantization."""
        return self.floating and (self.bits, self.group_size) == (4, MX_BLOCK)


def fitting_group_size(wanted: int, inputs: int) -> int:
    """Largest multiple of 8 up to ``wanted`` that divides ``inputs``; ``wanted`` if none does, or if it is 0."""
    return next((size for size in range(wanted - wanted % 8, 0, -8) if inputs % size == 0), wanted)


MX_BLOCK = 32
"""Number of inputs that share a scale in formats of the OCP Microscaling specification (2023)."""
MAX_FP8 = 448.0
"""Largest e4m3 number."""
UNQUANTIZED = Format()


@dataclass(frozen=True)
class Scheme:
    """Quantization formats of a model's matrices."""

    layers: Format = UNQUANTIZED
    head: Format = UNQUANTIZED
    """Format of embedding and LM head: 8 bits if layers have 4, since both affect quality and take little time."""
    sensitive: Format | None = None
    """Format of the layers' matrices that lose most quality in 4 bits (``is_sensitive``); None: ``layers``."""
    values_only: bool = False
    """Apply ``sensitive`` to value projections only, which takes fewer bits."""

    def format_of(self, name: str) -> Format:
        """Format of a layer's matrix; ``name`` is its name in the checkpoint, without ``.weight``."""
        chosen = makes_values(name) if self.values_only else is_sensitive(name)
        return self.sensitive if self.sensitive and chosen else self.layers

    def kept(self, wanted: Format, stored: Format) -> Format:
        """Format to compare with the checkpoint's format ``stored``: ``wanted``, but ``layers`` for a sensitive matrix
        that the checkpoint stores with the bits of ``layers``, since more bits would not restore its precision."""
        has_as_few = (stored.bits, stored.floating) == (self.layers.bits, self.layers.floating)
        return self.layers if wanted == self.sensitive and has_as_few else wanted


_VALUES = re.compile(
    r"(^|\.)((v|kv|value)_proj|v_proj\.linear|[Ww]v|v_lin|project_v|(self|attention)\.value|kv_a_proj_with_mqa|kv_b_proj)\Z"
)
"""Names of value projections, and of the KV down and up projections of multi-head latent attention."""
_FUSED = re.compile(r"(^|\.)(qkv_proj|query_key_value|c_attn|[Ww]qkv|qkv|in_proj_qkvz?)\Z")
"""Names of fused QKV projections in modules of transformers. Penstock's implementations use the names of separate
projections."""
_DOWN = re.compile(
    r"(^|\.)(down_proj|proj_down|w2|w_out|Wo|c_proj|fc2|fc_out|dense_4h_to_h|lin2|layer_2|ffn\.2|output_linear"
    r"|(?<!attention\.)output\.dense|feed_forward\.(value|output))\Z"
)
"""Names of down projections of MLPs and experts."""
_IN_ATTENTION = re.compile(r"(^|\.)(self_)?att(n|ention)\.[^.]*\Z")
"""Names of attention matrices, where ``c_proj`` and ``Wo`` are output projections."""
_LAYER = re.compile(r"\.(\d+)\.")
"""Layer index in a name."""


def makes_values(name: str) -> bool:
    """True for a value projection, or the KV projections of multi-head latent attention."""
    return _VALUES.search(name) is not None


def is_sensitive(name: str) -> bool:
    """True for a matrix that keeps 8 bits in 4-bit schemes, since 4 bits would cost it most quality.

    These are all value projections, and the down projections of every third layer; a model then has about 4.9 bits per
    weight. Fused QKV projections are sensitive in every third layer: without grouped-query attention, these take as
    many bits as the value projections of all layers.

    Args:
        name: name in the checkpoint, without ``.weight``.
    """
    if makes_values(name):
        return True
    is_down = _DOWN.search(name) and not _IN_ATTENTION.search(name)
    layer = _LAYER.search(name) if is_down or _FUSED.search(name) else None
    return layer is not None and is_sensitive_layer(int(layer[1]))


def is_sensitive_layer(layer: int) -> bool:
    """True if the down projections and fused QKV projection of a layer (index from 0) are sensitive."""
    return layer % 3 == 2


QuantizationName = Literal["none", "w8a8", "w4a8", "w4a8-g32", "wint8", "wint4", "wint4-g32", "fp8"]
"""Values of ``quantization``: bits of weights (``w``, ``wint``) and activations (``a``). Names with ``-g32`` are older
aliases. ``fp8``: e4m3 weights and activations, on GPUs, with an unquantized head, as in vLLM."""

ROTATION = 64
"""Rotation block size of quantization at load, which reduces the error of 8-bit activations: on real models, one scale
per token is then as precise as one per 32 inputs."""
_W8A8, _WINT8 = Format(8, activation_bits=8, rotation=ROTATION), Format(8)
_W4A8 = Format(4, 16, 8, rotation=ROTATION, integer_scales=True)
_WINT4 = Format(4, 32, rotation=ROTATION)
SCHEMES: dict[str, Scheme] = {
    "none": Scheme(),
    "w8a8": Scheme(_W8A8, _W8A8),
    "w4a8": Scheme(_W4A8, _W8A8, sensitive=_W8A8),
    "w4a8-g32": Scheme(_W4A8, _W8A8, sensitive=_W8A8),
    "wint8": Scheme(_WINT8, _WINT8),
    "wint4": Scheme(_WINT4, _WINT8, sensitive=_WINT8),
    "wint4-g32": Scheme(_WINT4, _WINT8, sensitive=_WINT8),
    "fp8": Scheme(Format(8, activation_bits=8, floating=True)),
}
"""Scheme by name."""
assert set(SCHEMES) == set(get_args(QuantizationName))
