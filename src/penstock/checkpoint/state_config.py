"""Configuration of layers with recurrent state, by kind."""

from __future__ import annotations

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
    norm_eps: float | None = None
    """Epsilon of the gated norm; None: that of the other norms."""
    beta_scale: float = 1.0
    """Factor of beta (``DeltaSizes``)."""

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
class KimiDeltaConfig:
    """Kimi delta attention (Kimi Team, 2025): a gated delta net with a decay per channel of the keys."""

    heads: int
    dim: int
    """Elements per query, key and value; a head's state is ``[dim, dim]``."""
    kernel: int
    """Number of tokens that the short convolution sees."""

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

    def spec(self, dtype: str, heads: int = 0) -> StateSpec:
        """State of a rank with ``heads``; 0: all."""
        heads = heads or self.heads
        return StateSpec(
            {"state": StateTensor((heads, self.dim, self.dim), "float32")},
            {"qkv": StateTensor((3 * heads * self.dim,), dtype)},
        )


StateConfig = GatedDeltaNetConfig | KimiDeltaConfig | LightningConfig
"""Configuration of a layer with state."""
