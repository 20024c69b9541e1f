"""Quantization: formats of weights, and the names that options and ``config.json`` give them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd
from typing import Literal, get_args


@dataclass(frozen=True)
class Format:
    """Quantization of a matrix with one scale a group of inputs and output; or none.

    Penstock's own rounding is to nearest. 8-bit integers lie in [-127, 127], the largest magnitude of a group being
    127; 4-bit integers lie in [-8, 7], with the scale of least squared error (``ops.scale_search``); the largest
    magnitude of 8-bit floating-point numbers is ``MAX_FP8``. Checkpoints' integers may be -128, too.
    """

    bits: int = 0
    """Bits of a weight: 8 or 4; 0 leaves weights unquantized."""
    group_size: int = 0
    """Inputs that share a scale, a multiple of 8; 0 is one scale for all inputs of an output (per channel)."""
    activation_bits: int = 0
    """8 quantizes the input of the product, too, with one scale a row (dynamic, per token), or one a row and group with
    ``activation_groups`` and where weights are floating-point numbers in groups; 0 does not."""
    floating: bool = False
    """Whether weights are floating-point numbers in place of integers: e4m3 in 8 bits, and of 4 bits in groups of
    ``MX_BLOCK`` e2m1 (mxfp4), which come from checkpoints. Others of 4 bits (nf4, fp4) are dequantized."""
    rows_per_scale: int = 1
    """Outputs that share a scale; 0 is one scale for the matrix (per tensor). Other than 1 with ``floating`` only."""
    asymmetric: bool = False
    """Whether groups have an offset, too: a weight is its integer times the scale plus the offset, as zero points of
    AWQ and GPTQ and minima of GGUF are. Such integers come from checkpoints; Penstock's own rounding is symmetric."""
    integer_scales: bool = False
    """Whether the scale of a group is an integer from -15 to 15 times the scale of its output, in groups of 8, 16 or 32
    inputs. A weight is then an integer of 8 bits times the scale of its output, so that products with activations in 8
    bits are sums of integers (QServe, Lin et al., 2024)."""
    activation_groups: bool = False
    """Whether activations in 8 bits have one scale a row and group, not one a row. An outlier then costs precision in
    its own group only."""
    rotation: int = 0
    """Inputs of a block, a power of two, whose weights and activations are rotated by a Hadamard matrix before they
    are rounded (``ops.hadamard``); 0: not rotated."""

    def __post_init__(self) -> None:
        if self.group_size % 8:
            raise ValueError(f"group_size {self.group_size} is not a multiple of 8")
        if self.floating and self.bits not in (4, 8):
            raise ValueError("floating-point weights have 8 bits or 4")
        if self.rows_per_scale != 1 and not self.floating:
            raise ValueError("integers have a scale an output")
        if self.asymmetric and (self.floating or not self.bits):
            raise ValueError("only integers have offsets")
        if self.integer_scales and (self.bits, self.activation_bits, self.floating or self.asymmetric) != (4, 8, False):
            raise ValueError("only symmetric 4-bit integers with 8-bit activations have integer scales")
        if self.activation_groups and (self.activation_bits, bool(self.group_size), self.floating) != (8, True, False):
            raise ValueError("only 8-bit activations of integers in groups have scales of groups")
        if self.integer_scales and self.group_size not in (8, 16, 32):
            raise ValueError(f"groups of {self.group_size} inputs have no integer scales")
        if self.rotation not in (0, 1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"rotation {self.rotation} is not a power of two up to 64")
        if self.rotation and (self.floating or not self.bits):
            raise ValueError("only integers are rotated")

    def __str__(self) -> str:
        """For the log: ``int4 in groups of 128 with offsets``."""
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
        """Inputs of a rotated block in a matrix of so many: the largest power of two up to ``rotation`` that divides
        them; 1 where nothing is rotated."""
        return gcd(self.rotation or 1, inputs)

    @property
    def is_mxfp4(self) -> bool:
        """Whether weights are 4-bit floating-point numbers that kernels multiply as they are."""
        return self.floating and (self.bits, self.group_size) == (4, MX_BLOCK)


def fitting_group_size(wanted: int, inputs: int) -> int:
    """Largest multiple of 8 up to ``wanted`` that divides ``inputs``; ``wanted`` if no multiple of 8 does.

    Args:
        wanted: inputs of a group; 0, one scale for all inputs, is returned as it is.
    """
    return next((size for size in range(wanted - wanted % 8, 0, -8) if inputs % size == 0), wanted)


MX_BLOCK = 32
"""Inputs that share a scale in formats of the OCP Microscaling specification (2023)."""
MAX_FP8 = 448.0
"""The largest 8-bit floating-point number (e4m3)."""
UNQUANTIZED = Format()


@dataclass(frozen=True)
class Scheme:
    """The format of each matrix of a model."""

    layers: Format = UNQUANTIZED
    head: Format = UNQUANTIZED
    """Format of embedding and language model head, which keep 8 bits where layers have 4: they are little of the work
    and much of the quality."""
    sensitive: Format | None = None
    """Format of the layers' matrices that lose most quality in 4 bits (``is_sensitive``); None: as ``layers``."""
    values_only: bool = False
    """Only value projections have the format ``sensitive``: fewer bits than with the other sensitive matrices."""

    def format_of(self, name: str) -> Format:
        """The format of a layer's matrix.

        Args:
            name: in the checkpoint, without ``.weight``.
        """
        chosen = makes_values(name) if self.values_only else is_sensitive(name)
        return self.sensitive if self.sensitive and chosen else self.layers

    def kept(self, wanted: Format, stored: Format) -> Format:
        """The format to compare with a checkpoint's own: that of the other layers for a sensitive matrix that has as
        few bits in the checkpoint, as more bits add nothing to it."""
        has_as_few = (stored.bits, stored.floating) == (self.layers.bits, self.layers.floating)
        return self.layers if wanted == self.sensitive and has_as_few else wanted


_VALUES = re.compile(
    r"(^|\.)((v|kv|value)_proj|v_proj\.linear|[Ww]v|v_lin|project_v|(self|attention)\.value|kv_a_proj_with_mqa|kv_b_proj)\Z"
)
"""Names of value projections; in multi-head latent attention, of the down and up projections of keys and values."""
_FUSED = re.compile(r"(^|\.)(qkv_proj|query_key_value|c_attn|[Ww]qkv|qkv|in_proj_qkvz?)\Z")
"""Names of queries, keys and values in one matrix. They are those of modules of transformers: families of Penstock's
own ask for its parts, by the names of separate projections."""
_DOWN = re.compile(
    r"(^|\.)(down_proj|proj_down|w2|w_out|Wo|c_proj|fc2|fc_out|dense_4h_to_h|lin2|layer_2|ffn\.2|output_linear"
    r"|(?<!attention\.)output\.dense|feed_forward\.(value|output))\Z"
)
"""Names of down projections of MLPs and experts."""
_IN_ATTENTION = re.compile(r"(^|\.)(self_)?att(n|ention)\.[^.]*\Z")
"""Names of matrices of attention, where ``c_proj`` and ``Wo`` are output projections."""
_LAYER = re.compile(r"\.(\d+)\.")


def makes_values(name: str) -> bool:
    """Whether a matrix is a value projection, or makes latent vectors in its place."""
    return _VALUES.search(name) is not None


def is_sensitive(name: str) -> bool:
    """Whether a matrix keeps 8 bits in schemes of 4 bits, as it loses the most.

    These are value projections, which are few, and the down projections of every third layer; a model then has 4.9 bits
    a weight or little more. Queries, keys and values in one matrix are sensitive in every third layer: without grouped
    queries, that takes as many bits as the value projections of all layers.

    Args:
        name: in the checkpoint, without ``.weight``.
    """
    if makes_values(name):
        return True
    is_down = _DOWN.search(name) and not _IN_ATTENTION.search(name)
    layer = _LAYER.search(name) if is_down or _FUSED.search(name) else None
    return layer is not None and is_sensitive_layer(int(layer[1]))


def is_sensitive_layer(layer: int) -> bool:
    """Whether a layer's down projections, and its queries, keys and values in one matrix, are sensitive."""
    return layer % 3 == 2


QuantizationName = Literal["none", "w8a8", "w4a8", "w4a8-g32", "wint8", "wint4", "wint4-g32", "fp8"]
"""Values of ``quantization``: bits of weights (``w``, ``wint``) and activations (``a``); names with ``-g32`` are older
ones of the same formats;
``fp8``: floating-point weights and activations, on GPUs, with an unquantized head, as in vLLM."""

ROTATION = 64
"""Inputs of a rotated block in Penstock's own rounding, of which activations in 8 bits lose less. On real models, one
scale a token then costs as little as one each 32 inputs."""
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
"""The scheme of each name."""
assert set(SCHEMES) == set(get_args(QuantizationName))
