"""Configuration of layers with recurrent state, by kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock.core import Code, PenstockError

from .state_spec import StateSpec, StateTensor, check_sizes


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated delta net (Yang et al., 2024): short convolution, then linear attention by the gated delta rule."""

    key_heads: int
    value_heads: int
    """Number of value heads, a multiple of ``key_heads``; each has a state of ``key_dim`` times ``value_dim``."""
    key_dim: int
    value_dim: int
    kernel: int
    """Number of tokens that the short convolution sees."""
    module: str = "linear_attn"
    """Name of the module in the checkpoint."""
    fused_projections: bool = False
    """One matrix for queries, keys, values and output gate by key head, another for both gates (Qwen3-Next); else four
    matrices (Qwen3.5)."""
    norm_eps: float | None = None
    """Epsilon of the gated norm; None: that of the other norms."""
    beta_scale: float = 1.0
    """Factor of beta (``DeltaSizes``)."""

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """Parameters of a layer's matrices and convolutions, and of those that are never quantized."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        plain = 2 * hidden_size * self.value_heads + (2 * keys + values) * self.kernel
        return hidden_size * (2 * keys + 3 * values) + plain, plain

    def spec(self, dtype: str, key_heads: int = 0, value_heads: int = 0) -> StateSpec:
        """State of a rank with ``key_heads`` and ``value_heads``; 0: all."""
        key_heads, value_heads = key_heads or self.key_heads, value_heads or self.value_heads
        channels, heads = 2 * key_heads * self.key_dim + value_heads * self.value_dim, value_heads
        return StateSpec(
            {
                "conv": StateTensor((self.kernel - 1, channels), dtype),
                "state": StateTensor((heads, self.key_dim, self.value_dim), "float32"),
            },
            {
                "conv_in": StateTensor((channels,), dtype),
                "qkv": StateTensor((channels,), dtype),
                "gates": StateTensor((2 * heads,), dtype),
            },
        )


@dataclass(frozen=True)
class Mamba2Config:
    """State space model with a scalar decay per head (Mamba 2; Dao and Gu, 2024): short convolution of x, B and C, then
    the recurrence, then a gated norm."""

    heads: int
    head_dim: int
    groups: int
    """Number of groups of heads that share B and C; also the number of groups of the norm."""
    state_size: int
    """Elements of B and C; each head has a state of ``state_size`` times ``head_dim``."""
    kernel: int
    """Number of tokens that the short convolution sees."""
    module: str = "mamba"
    """Name of the module in the checkpoint."""
    convolution_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    min_step: float = 0.0
    max_step: float = math.inf
    """Limits of the step (``dt``), after softplus."""
    norm: bool = True
    """False: multiply by SiLU of the gate, without a norm."""
    norm_eps: float = 0.0
    """Epsilon of the norm; 0: same as of other norms."""
    gate_first: bool = True
    """Multiply by the gate before the norm; False: after it."""
    input_scale: float = 1.0
    output_scale: float = 1.0
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Scales of the gate, x, B, C, and the step before its bias is added (Falcon-H1)."""

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """Parameters of a layer's matrices and convolutions, and of those that are never quantized."""
        keys, values = self.groups * self.state_size, self.heads * self.head_dim
        plain = hidden_size * self.heads + (2 * keys + values) * self.kernel
        return hidden_size * (2 * keys + 3 * values) + plain, plain

    def spec(self, dtype: str, heads: int = 0, groups: int = 0) -> StateSpec:
        """State of a rank with ``heads`` and ``groups``; 0: all."""
        heads, groups = heads or self.heads, groups or self.groups
        channels = heads * self.head_dim + 2 * groups * self.state_size
        return StateSpec(
            {
                "conv": StateTensor((self.kernel - 1, channels), dtype),
                "state": StateTensor((heads, self.state_size, self.head_dim), "float32"),
            },
            {
                "conv_in": StateTensor((channels,), dtype),
                "xbc": StateTensor((channels,), dtype),
                "steps": StateTensor((heads,), dtype),
            },
        )


@dataclass(frozen=True)
class GatedConvolutionConfig:
    """Gated short convolution (LFM2): the state is the convolution's inputs."""

    channels: int
    kernel: int
    """Number of tokens that the convolution sees."""
    bias: bool = False
    """The convolution and both projections have biases."""
    module: str = "conv"
    """Name of the module in the checkpoint."""

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """Parameters of a layer's matrices and convolutions, and of those that are never quantized."""
        plain = self.channels * self.kernel
        return 4 * hidden_size * self.channels + plain, plain

    def spec(self, dtype: str, channels: int = 0) -> StateSpec:
        """State of a rank with ``channels``; 0: all."""
        channels = channels or self.channels
        return StateSpec(
            {"conv": StateTensor((self.kernel - 1, channels), dtype)}, {"conv_in": StateTensor((channels,), dtype)}
        )


@dataclass(frozen=True)
class MambaConfig:
    """Mamba (Gu and Dao, 2023): short convolution, then a selective scan with ``state_size`` states per channel."""

    channels: int
    state_size: int
    step_rank: int
    """Rank of the projection to the steps (dt)."""
    kernel: int
    """Number of tokens that the short convolution sees."""
    bias: bool = False
    """The projections to and from the channels have biases."""
    convolution_bias: bool = True
    norms: Literal["none", "weighted", "unweighted"] = "none"
    """RMS norms of dt, B and C: none (Mamba), with weights (Jamba), or without (FalconMamba)."""
    norm_eps: float = 1e-6
    module: str = "mixer"
    """Name of the module in the checkpoint."""

    def __post_init__(self) -> None:
        check_sizes(channels=self.channels, state_size=self.state_size, step_rank=self.step_rank)

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """Parameters of a layer's matrices and convolutions, and of those that are never quantized."""
        plain = self.channels * self.kernel
        return self.channels * (3 * hidden_size + 2 * (self.step_rank + self.state_size)) + plain, plain

    def spec(self, dtype: str, channels: int = 0) -> StateSpec:
        """State of a rank with ``channels``; 0: all."""
        channels = channels or self.channels
        return StateSpec(
            {
                "conv": StateTensor((self.kernel - 1, channels), dtype),
                "state": StateTensor((self.state_size, channels), "float32"),
            },
            {
                "conv_in": StateTensor((channels,), dtype),
                "x": StateTensor((channels,), dtype),
                "steps": StateTensor((channels,), dtype),
                "b": StateTensor((self.state_size,), dtype),
            },
        )


@dataclass(frozen=True)
class RGLRUConfig:
    """Recurrent block of Griffin (De et al., 2024): short convolution, then a real-gated linear recurrent unit (RG-LRU)
    with one state per channel."""

    heads: int
    """Number of blocks of the gates' block-diagonal matrices."""
    width: int
    """Number of channels of a head."""
    kernel: int
    """Number of tokens that the short convolution sees."""
    activation: str = "gelu_tanh"
    """Activation of the gate of the output: a key of ``ACTIVATIONS``."""
    module: str = "temporal_block"
    """Name of the module in the checkpoint."""

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """Parameters of a layer's matrices and convolutions, and of those that are never quantized."""
        plain = self.heads * self.width * (2 * self.width + self.kernel)
        return self.heads * self.width * 3 * hidden_size + plain, plain

    def spec(self, dtype: str, heads: int = 0) -> StateSpec:
        """State of a rank with ``heads``; 0: all."""
        heads = heads or self.heads
        channels = heads * self.width
        return StateSpec(
            {
                "conv": StateTensor((self.kernel - 1, channels), dtype),
                "state": StateTensor((heads, self.width), "float32"),
            },
            {
                "conv_in": StateTensor((channels,), dtype),
                "x": StateTensor((channels,), dtype),
                "gates": StateTensor((heads, 2 * self.width), dtype),
            },
        )


@dataclass(frozen=True)
class KimiDeltaConfig:
    """Kimi delta attention (Kimi Team, 2025): a gated delta net with a decay per channel of the keys."""

    heads: int
    dim: int
    """Elements per query, key and value; a head's state is ``[dim, dim]``."""
    kernel: int
    """Number of tokens that the short convolution sees."""

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """Parameters of a layer's matrices and convolutions, and of those that are never quantized."""
        values = self.heads * self.dim
        plain = hidden_size * (self.heads + self.dim) + self.dim * values + 3 * values * self.kernel
        return hidden_size * (4 * values + self.dim) + self.dim * values + plain, plain

    def spec(self, dtype: str, heads: int = 0) -> StateSpec:
        """State of a rank with ``heads``; 0: all."""
        heads = heads or self.heads
        channels = 3 * heads * self.dim
        return StateSpec(
            {
                "conv": StateTensor((self.kernel - 1, channels), dtype),
                "state": StateTensor((heads, self.dim, self.dim), "float32"),
            },
            {
                "conv_in": StateTensor((channels,), dtype),
                "qkv": StateTensor((channels,), dtype),
                "gates": StateTensor((heads * (1 + self.dim),), dtype),
            },
        )


@dataclass(frozen=True)
class LightningConfig:
    """Lightning attention (Qin et al., 2024): linear attention with a constant decay per head and layer."""

    heads: int
    dim: int
    """Elements per query, key and value; a head's state is ``[dim, dim]``."""
    num_layers: int
    """Number of layers of the model. The decay of a head depends on the share of the layers before it."""

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """Parameters of a layer's matrices and convolutions, and of those that are never quantized."""
        return 5 * hidden_size * self.heads * self.dim, 0

    def spec(self, dtype: str, heads: int = 0) -> StateSpec:
        """State of a rank with ``heads``; 0: all."""
        heads = heads or self.heads
        return StateSpec(
            {"state": StateTensor((heads, self.dim, self.dim), "float32")},
            {"qkv": StateTensor((3 * heads * self.dim,), dtype)},
        )


MAX_KERNEL = 8
"""Largest number of tokens that a short convolution may see; a limit of the CPU kernels."""


@dataclass(frozen=True)
class LibraryStateConfig:
    """Recurrent state of a model run by transformers. Its layers and sizes are known once the model is built."""

    def num_weights(self, hidden_size: int) -> tuple[int, int]:
        """No weights: those of the whole model are counted (``COUNTED_WEIGHTS``)."""
        return 0, 0

    def spec(self, dtype: str) -> StateSpec:
        """An empty state."""
        return StateSpec({})


StateConfig = (
    GatedDeltaNetConfig
    | KimiDeltaConfig
    | LightningConfig
    | Mamba2Config
    | MambaConfig
    | GatedConvolutionConfig
    | RGLRUConfig
    | LibraryStateConfig
)
"""Configuration of a layer with state."""


def check_kernel(kernel: int, field: str) -> int:
    """Return the number of tokens that a short convolution sees.

    Args:
        field: field of ``config.json``, for the error message.

    Raises ``PenstockError`` (``unsupported``) for numbers that the kernels do not support.
    """
    if not 2 <= kernel <= MAX_KERNEL:
        message = f"{field} {kernel} is not supported; it must be from 2 to {MAX_KERNEL}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return kernel
