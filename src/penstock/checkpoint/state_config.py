"""Configuration of layers with recurrent state, by kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .state_spec import StateSpec, StateTensor


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

    def weights(self, hidden_size: int) -> int:
        """Parameters of the matrices and convolutions of a layer."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        outputs = 2 * keys + 2 * values + 2 * self.value_heads
        return hidden_size * (outputs + values) + (2 * keys + values) * self.kernel


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

    def weights(self, hidden_size: int) -> int:
        """Parameters of the matrices and convolutions of a layer."""
        keys, values = self.groups * self.state_size, self.heads * self.head_dim
        outputs = 2 * keys + 2 * values + self.heads
        return hidden_size * (outputs + values) + (2 * keys + values) * self.kernel


StateConfig = GatedDeltaNetConfig | Mamba2Config
"""Configuration of a layer with state."""
