"""What dense families have in other ways than Llama: the switches of the shared decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class NormOptions:
    """The norms of a model: RMS norms whose weights have the model's dtype, unless said otherwise."""

    kind: Literal["rms", "layer"] = "rms"
    float32: bool = False
    """Whether an RMS norm's product with its weights is computed in float32, and rounded only then."""
    unit_offset: bool = False
    """Whether an RMS norm multiplies by one more than the weights of the checkpoint; always in float32."""
    bias: bool = False
    """Whether a layer norm has one."""


@dataclass(frozen=True)
class LayerNorms:
    """Names of a decoder layer's norms in the checkpoint; None where the layer has none there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Of what is added to the residual stream."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class QKNormOptions:
    """Norms on queries and keys, which are ``q_norm`` and ``k_norm`` in the checkpoint."""

    over: Literal["head", "projection"] = "head"
    """What is normed: each head, or all heads of a token together."""
    weight: Literal["shared", "own"] = "shared"
    """Of a norm over heads: whether they share the weights, or each has its own."""
    after_rope: bool = False


@dataclass(frozen=True)
class DecoderOptions:
    """How a decoder differs from Llama's."""

    norm: NormOptions = field(default_factory=NormOptions)
    layer_norms: LayerNorms = field(default_factory=LayerNorms)
    qk_norm: QKNormOptions = field(default_factory=QKNormOptions)
    """Of models with ``ModelConfig.qk_norm``."""
    parallel_residual: bool = False
    """Whether the MLP reads what attention reads; both are added to the residual stream."""
    activation: str = "silu"
    """Of the MLP, a name of ``ops.activations.ACTIVATIONS``; of a gated one, of ``GATES``, too."""
    gated_mlp: bool = True
    """Whether the MLP is ``down(activation(gate(x)) * up(x))``; otherwise ``c_proj(activation(c_fc(x)))``."""
    rope_interleaved: bool = False
    """Whether neighbours in a head are rotated against each other (GPT-J style), not its halves."""
    partial_rotary_factor: float = 1.0
    """Share of a head that is rotated."""
    rope_layers: tuple[bool, ...] = ()
    """Which layers have rotary positions; empty is all."""
    attention_scale: float | None = None
    """Of the products of queries and keys; None is ``head_dim ** -0.5``."""
    attention_softcap: float = 0.0
    """As of ``AttentionOptions``."""
    attention_sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and has no value (``sinks``)."""
    query_scaling: tuple[float, int] = (0.0, 0)
    """A factor and an interval: queries are multiplied by ``1 + factor * log(1 + position // interval)``."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """Logits become ``cap * tanh(logit / cap)``; 0 leaves them."""
