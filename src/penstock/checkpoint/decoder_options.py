"""Options of the shared decoder: how a family differs from Llama."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class NormOptions:
    """The norms of a model. The default is an RMS norm with weights of the model's dtype."""

    kind: Literal["rms", "layer"] = "rms"
    float32: bool = False
    """Multiply by the RMS norm's weight in float32, and round the product."""
    unit_offset: bool = False
    """Multiply by 1 + weight of the RMS norm, in float32 (Gemma)."""
    bias: bool = False
    """Layer norms have a bias."""
    as_stored: bool = False
    """Do not round the RMS norm's weight to the model's dtype; requires ``float32``."""


@dataclass(frozen=True)
class LayerNorms:
    """Names of a decoder layer's norms in the checkpoint; None: no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Norm of the attention output, before it is added to the residual stream (post-norm)."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    """Norm of the MLP output, before it is added to the residual stream (post-norm)."""


@dataclass(frozen=True)
class NormedResidual:
    """Residual connections from the output of a norm, ``x = a * norm(x) + b * module(norm(x))`` (MiniMax-01). A pair is
    ``(a, b)`` of a kind of module."""

    attention: tuple[float, float]
    state: tuple[float, float]
    mlp: tuple[float, float]


@dataclass(frozen=True)
class QKNormOptions:
    """Norms applied to queries and keys (``q_norm``, ``k_norm``)."""

    scope: Literal["head", "projection"] = "head"
    """Normalize each head separately, or all heads of a token together."""
    weight: Literal["shared", "per_head", "none"] = "shared"
    """Norm weight with scope "head": shared by all heads, one per head, or absent. With "none", only layers with rotary
    embedding have norms."""
    after_rope: bool = False
    """Normalize after the rotary embedding."""


@dataclass(frozen=True)
class QueryScaling:
    """Query scale by position: ``1 + factor * log(1 + (position + offset) // interval)`` (Nakanishi, 2025)."""

    factor: float
    interval: float
    offset: int = 0
    every_layer: bool = True
    """False: only in layers without rotary embedding."""


@dataclass(frozen=True)
class DecoderOptions:
    """Differences from Llama's decoder. The defaults are Llama."""

    norm: NormOptions = field(default_factory=NormOptions)
    layer_norms: LayerNorms = field(default_factory=LayerNorms)
    state_layer_norms: LayerNorms | None = None
    """Norms of layers with recurrent state; None: ``layer_norms``."""
    mtp_layer_norms: LayerNorms | None = None
    """Norms of the layers for multi-token prediction; None: ``layer_norms``."""
    normed_residual: NormedResidual | None = None
    """None: residual connections from the input of a norm."""
    qk_norm: QKNormOptions = field(default_factory=QKNormOptions)
    """Used if ``ModelConfig.qk_norm`` is set."""
    separate_mlps: bool = False
    """A layer is either attention (or a recurrent part), or an MLP (Mamba, Nemotron-H); False: first one, then the
    other."""
    parallel_residual: bool = False
    """Attention and MLP read the same input; their outputs are added (GPT-NeoX, Falcon). The MLP has a separate norm of
    this input if ``layer_norms.before_mlp`` is set; else it reads the normalized input of attention."""
    activation: str = "silu"
    """Activation of the MLP: a key of ``ops.activations.ACTIVATIONS``, and of ``GATES`` if ``gated_mlp``."""
    gated_mlp: bool = True
    """MLP is ``down(activation(gate(x)) * up(x))``; else ``c_proj(activation(c_fc(x)))``."""
    rope_interleaved: bool = False
    """Rotate adjacent dimensions (GPT-J) instead of the two halves of a head (GPT-NeoX)."""
    partial_rotary_factor: float = 1.0
    """Fraction of a head's dimensions that rotary embedding rotates."""
    rope_layers: tuple[bool, ...] = ()
    """True for each layer with rotary embedding; empty: all layers. MTP layers without an entry have one."""
    attention_scale: float | None = None
    """Softmax scale; None: ``head_dim ** -0.5``."""
    attention_gate: bool = False
    """Multiply the output of attention by the sigmoid of a projection of its input (Qwen3-Next)."""
    attention_softcap: float = 0.0
    """Soft cap of the attention scores, ``cap * tanh(score / cap)`` (Gemma 2); 0: off."""
    attention_sinks: bool = False
    """Each head has a learned sink logit in the softmax denominator (gpt-oss)."""
    attention_chunks: bool = False
    """Windows are chunks: a query sees the positions of its chunk up to itself (Llama 4); False: sliding windows."""
    alibi: tuple[float, ...] = ()
    """ALiBi slope of each head (Press et al., 2022): the scores of a key fall by it per position of distance from the
    query; empty: off."""
    query_scaling: QueryScaling | None = None
    attention_scales: tuple[float, float] = (1.0, 1.0)
    """Scales of the input and the output of attention (Falcon-H1)."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Scales of the gate of a gated MLP, before the activation, and of its output (Falcon-H1). Others than 1 require
    the activation ``silu``."""
    embedding_norm: bool = False
    """Normalize the embedding (``model.embed_norm``; BLOOM)."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Scale of the attention and MLP outputs that are added to the residual stream (Granite)."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """Soft cap of the logits, ``cap * tanh(logit / cap)``; 0: off."""
