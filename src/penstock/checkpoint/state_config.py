"""Configuration of layers with recurrent state, by kind."""

from __future__ import annotations

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
class GatedConvolutionConfig:
    """Gated short convolution (LFM2): the state is the convolution's inputs."""

    channels: int
    kernel: int
    """Number of tokens that the convolution sees."""
    bias: bool = False
    """The convolution and both projections have biases."""
    module: str = "conv"
    """Name of the module in the checkpoint."""

    def num_weights(self, hidden_size: int) -> int:
        """Parameters of the matrices of a layer."""
        return 4 * hidden_size * self.channels

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

    def num_weights(self, hidden_size: int) -> int:
        """Parameters of the matrices of a layer."""
        return self.channels * (3 * hidden_size + 2 * (self.step_rank + self.state_size))

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
class GatedLinearUnitConfig:
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

    def num_weights(self, hidden_size: int) -> int:
        """Parameters of the matrices of a layer."""
        return self.heads * self.width * (3 * hidden_size + 2 * self.width)

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


StateConfig = GatedDeltaNetConfig | GatedConvolutionConfig | MambaConfig | GatedLinearUnitConfig
"""Configuration of a layer with state."""
MAX_KERNEL = 8
"""Largest number of tokens that a short convolution may see; a limit of the CPU kernels."""


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
