"""The decoder layer of most families, with factories for attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.decoder_options import QKNormOptions
from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.state_config import (
    GatedConvolutionConfig,
    GatedDeltaNetConfig,
    KimiDeltaConfig,
    LibraryStateConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    RGLRUConfig,
)
from penstock.layers import (
    MLP,
    RGLRU,
    Attention,
    AttentionLayer,
    BuildContext,
    GatedConvolution,
    GatedDeltaNet,
    GatedMLP,
    KimiDeltaAttention,
    LatentAttention,
    LayerNorm,
    LightningAttention,
    Mamba,
    Mamba2Mixer,
    MLPLayer,
    Norm,
    QKNormLayers,
    RMSNorm,
    ScaledGatedMLP,
    StateLayer,
)
from penstock.layers.norm import UnweightedRMSNorm
from penstock.ops import Batch, LayerExport, QKNorms
from penstock.parallel import Shard, shard_heads

StateFactory = Callable[[BuildContext, ModelConfig, int, str], StateLayer]
"""Function that builds the recurrent part of a layer. Last arguments: layer index, and prefix of its modules."""
AttentionFactory = Callable[[BuildContext, ModelConfig, int, str], AttentionLayer]
"""Function that builds the attention of a layer. Last arguments: layer index, and module name in the checkpoint."""
MLPFactory = Callable[[BuildContext, ModelConfig, int, str], MLPLayer]
"""Function that builds the MLP of a layer. Last arguments: layer index, and module name in the checkpoint."""


def make_norm(context: BuildContext, config: ModelConfig, name: str, size: int) -> Norm:
    """Build an RMS norm or a layer norm, as ``config.options.norm`` says."""
    options, eps = config.options.norm, config.rms_norm_eps
    if options.kind == "layer":
        return LayerNorm(context, name, size, eps, options.bias)
    return RMSNorm(context, name, size, eps, options.float32, options.unit_offset, options.as_stored)


def grouped_query_attention(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
    """``AttentionFactory`` of ``Attention``. MTP layers (from index ``num_layers`` on) have full attention."""
    options, rope = config.options, config.rope_of(layer)
    table = (
        torch.empty(context.max_len, 0, device=context.device)
        if rope is None
        else context.rope_table(config.rotary_dim, rope, config.max_position_embeddings)
    )
    fused = config.qk_norm and options.qk_norm == QKNormOptions()
    normed = config.qk_norm and not fused and (rope is not None or options.qk_norm.weight != "none")
    window = config.sliding_windows[layer] if layer < config.num_layers else 0
    return Attention(
        context,
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=table,
        window=window,
        chunked=options.attention_chunks and window > 0,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norms=_qk_norms(context, config, name) if fused else None,
        qk_norm_layers=_qk_norm_layers(context, config, name) if normed else None,
        rope_interleaved=options.rope_interleaved,
        scale=options.attention_scale,
        softcap=options.attention_softcap,
        sinks=_sinks(context, config, name) if options.attention_sinks else None,
        alibi=_alibi(context, config) if options.alibi else None,
        query_factors=_query_factors(context, config, rope is not None),
        gated=options.attention_gate,
    )


def make_attention(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
    """``AttentionFactory``: latent attention if configured, else grouped-query attention."""
    make = latent_attention if config.latent else grouped_query_attention
    return make(context, config, layer, name)


def make_state(context: BuildContext, config: ModelConfig, layer: int, name: str) -> StateLayer:
    """``StateFactory`` by ``config.state``."""
    match config.state:
        case GatedDeltaNetConfig() as state:
            return GatedDeltaNet(context, f"{name}.{state.module}", config.hidden_size, state, config.rms_norm_eps)
        case Mamba2Config() as state:
            eps = state.norm_eps or config.rms_norm_eps
            return Mamba2Mixer(context, f"{name}.{state.module}", config.hidden_size, state, eps)
        case GatedConvolutionConfig() as state:
            return GatedConvolution(context, f"{name}.{state.module}", config.hidden_size, state)
        case MambaConfig() as state:
            return Mamba(context, f"{name}.{state.module}", config.hidden_size, state)
        case RGLRUConfig() as state:
            return RGLRU(context, f"{name}.{state.module}", config.hidden_size, state)
        case KimiDeltaConfig() as state:
            return KimiDeltaAttention(context, f"{name}.self_attn", config.hidden_size, state, config.rms_norm_eps)
        case LightningConfig() as state:
            activation = config.options.activation
            return LightningAttention(context, f"{name}.self_attn", config.hidden_size, state, layer, activation)
        case LibraryStateConfig() | None:
            raise AssertionError("the model has no layers with state of ours")


def latent_attention(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
    """``AttentionFactory`` of ``LatentAttention``."""
    latent = config.latent
    assert latent
    return LatentAttention(
        context,
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        q_rank=latent.q_lora_rank,
        latent=latent.kv_lora_rank,
        nope_dim=latent.qk_nope_head_dim,
        rope_dim=latent.qk_rope_head_dim,
        value_dim=latent.v_head_dim,
        rope=context.rope_table(latent.qk_rope_head_dim, config.rope_parameters, config.max_position_embeddings)
        if latent.rope
        else None,
        interleaved=latent.rope_interleave,
        scale=latent.scale,
        bias=config.output_bias,
        indexer=latent.indexer,
        shares_selection=layer in config.shared_layers,
    )


def _query_factors(context: BuildContext, config: ModelConfig, has_rope: bool) -> Tensor | None:
    """``query_factors`` of ``Attention`` for ``query_scaling``; None if all factors are 1."""
    scaling = config.options.query_scaling
    if (
        scaling is None
        or context.max_len + scaling.offset <= scaling.interval
        or (has_rope and not scaling.every_layer)
    ):
        return None

    def make() -> Tensor:
        positions = torch.arange(context.max_len, dtype=torch.float32, device=context.device) + scaling.offset
        factors = torch.log1p(torch.floor(positions / scaling.interval)) * scaling.factor + 1.0
        half = factors[:, None].expand(-1, config.head_dim // 2)
        return torch.cat((half, torch.zeros_like(half)), -1)

    return context.shared_table(f"query factors {scaling} {config.head_dim}", make)


def _sinks(context: BuildContext, config: ModelConfig, name: str) -> Tensor:
    """Attention sinks of this rank's heads, ``[heads]`` float32."""
    heads, _ = shard_heads(context.group, config.num_heads, config.num_kv_heads)
    return context.read_weight(f"{name}.sinks", heads.total, rows=heads.rows, as_stored=True).float()


def _alibi(context: BuildContext, config: ModelConfig) -> Tensor:
    """ALiBi slopes of this rank's heads, ``[heads]`` float32."""
    heads, _ = shard_heads(context.group, config.num_heads, config.num_kv_heads)
    slopes = config.options.alibi[slice(*heads.rows)]
    return context.shared_table("alibi", lambda: torch.tensor(slopes, dtype=torch.float32, device=context.device))


def _qk_norms(context: BuildContext, config: ModelConfig, name: str) -> QKNorms:
    """RMS norms per head, fused with the rotary embedding."""
    q, k = (
        RMSNorm(
            context,
            f"{name}.{part}_norm",
            config.head_dim,
            config.rms_norm_eps,
            config.options.norm.float32,
            config.options.norm.unit_offset,
        )
        for part in "qk"
    )
    return QKNorms(q.weight, k.weight, config.rms_norm_eps)


def _qk_norm_layers(context: BuildContext, config: ModelConfig, name: str) -> QKNormLayers:
    options, size = config.options.qk_norm, config.head_dim
    shards = shard_heads(context.group, config.num_heads, config.num_kv_heads)

    def norm(part: str, heads: Shard) -> Norm:
        if options.weight == "none":
            return UnweightedRMSNorm(context, size, config.rms_norm_eps)
        if options.weight == "per_head":
            bounds = heads.first, heads.end, heads.total
            return LayerNorm(context, f"{name}.{part}_norm", size, config.rms_norm_eps, heads=bounds)
        norm_size = heads.total * size if options.scope == "projection" else size
        return make_norm(context, config, f"{name}.{part}_norm", norm_size)

    q, k = (norm(part, heads) for part, heads in zip("qk", shards, strict=True))
    return QKNormLayers(q, k, options.scope == "projection", options.after_rope)


def dense_mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
    """``MLPFactory``: ``GatedMLP`` if ``gated_mlp``, with scales ``ScaledGatedMLP``; else ``MLP``."""
    sizes, options = (config.hidden_size, config.intermediate_size, config.mlp_bias), config.options
    if options.mlp_scales != (1, 1):
        assert options.gated_mlp and options.activation == "silu"
        return ScaledGatedMLP(context, name, *sizes, options.mlp_scales)
    if options.gated_mlp:
        return GatedMLP(context, name, *sizes, options.activation)
    return MLP(context, (f"{name}.c_fc", f"{name}.c_proj"), *sizes, options.activation)


class DecoderLayer:
    """Attention, or a part with recurrent state, and MLP on a residual stream, with pre-norm, post-norm, or both.

    Args:
        number: index of the layer. The last layer stores the keys and values of all tokens, but computes hidden states
            only for ``batch.logits_indices``: those of other tokens are not used.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        number: int,
        attention: AttentionFactory,
        mlp: MLPFactory,
        state: StateFactory = make_state,
    ) -> None:
        name, options = f"model.layers.{number}", config.options
        has_state = config.has_state(number)
        own = (
            options.mtp_layer_norms if number >= config.num_layers else options.state_layer_norms if has_state else None
        )
        names = own or options.layer_norms

        mixes, has_mlp = config.has_attention(number) or has_state, config.has_mlp(number)

        def norm(norm_name: str | None, exists: bool) -> Norm | None:
            exists = exists and norm_name is not None
            return make_norm(context, config, f"{name}.{norm_name}", config.hidden_size) if exists else None

        self._ops = context.ops
        self._last = number == config.num_layers - 1
        self._parallel = options.parallel_residual
        self._residual_scale = options.residual_scale
        self._attention_scales = options.attention_scales
        weights = options.normed_residual
        self._mixer_weights = None if weights is None else weights.state if has_state else weights.attention
        self._mlp_weights = None if weights is None else weights.mlp
        self._before_attention = norm(names.before_attention, mixes)
        self.attention = (
            attention(context, config, number, f"{name}.self_attn") if config.has_attention(number) else None
        )
        self.state = state(context, config, number, name) if has_state else None
        self._after_attention = norm(names.after_attention, mixes)
        self._before_mlp = norm(names.before_mlp, has_mlp)
        self._mlp = mlp(context, config, number, f"{name}.mlp") if has_mlp else None
        self._after_mlp = norm(names.after_mlp, has_mlp)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch, export: LayerExport | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer.

        Args:
            x: ``[tokens, hidden]``, output of the previous layer. This layer adds it to the residual stream.
            residual: residual stream; None before the first layer.
            export: destination of a copy of the stored keys and values; None: no copy.

        Returns:
            The output of the layer's last part, not yet added to the residual stream, and the residual stream (None: it
            is the first result); ``[tokens, hidden]`` each, in the last layer ``[rows, hidden]``.
        """
        normed = x
        if self.attention or self.state:
            normed, residual = self._add(x, residual, self._before_attention, self._mixer_weights)
            mixed = self._mix(normed, cache, batch, export)
            x = self._output(mixed, self._after_attention, self._mixer_weights)
        elif self._last:
            x = self._ops.index_select(x, batch.logits_indices)
        if self._last and residual is not None:
            residual = self._ops.index_select(residual, batch.logits_indices)
            normed = self._ops.index_select(normed, batch.logits_indices) if self._parallel else normed
        if self._mlp is None:
            assert residual is not None
            return x, residual
        if self._parallel:
            assert residual is not None
            normed = self._before_mlp(residual) if self._before_mlp else normed
            residual = self._ops.add_residual(x, residual)
            x = normed
        else:
            x, residual = self._add(x, residual, self._before_mlp, self._mlp_weights)
        x = self._mlp(x, batch.logits_lora_slots if self._last else batch.lora_slots)
        return self._output(x, self._after_mlp, self._mlp_weights), residual

    def _mix(self, x: Tensor, cache: Any, batch: Batch, export: LayerExport | None) -> Tensor:
        """Apply attention, the part with recurrent state, or the sum of both."""
        last = self._last and not (self.attention and self.state)  # neither may select rows before the other has run
        mixed = None if self.state is None else self.state(x, batch, last)
        if self.attention is None:
            assert mixed is not None
            return mixed
        input_scale, output_scale = self._attention_scales
        attended = self.attention(self._scaled(x, input_scale), cache, batch, last, export)
        attended = self._scaled(attended, output_scale)
        if mixed is None:
            return attended
        both = self._ops.add_residual(attended, self._ops.clone(mixed))
        return self._ops.index_select(both, batch.logits_indices) if self._last else both

    def _add(
        self, x: Tensor, residual: Tensor | None, norm: Norm | None, weights: tuple[float, float] | None
    ) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream. Returns the input of the next module, and the residual stream.

        Args:
            weights: see ``NormedResidual``.
        """
        if weights and norm:
            normed = norm(x) if residual is None else norm.add(x, residual)[0]
            return normed, self._ops.scale(normed, weights[0])
        if residual is None:
            return (norm(x) if norm else x), x
        if norm:
            return norm.add(x, residual)
        residual = self._ops.add_residual(x, residual)
        return residual, residual

    def _output(self, x: Tensor, norm: Norm | None, weights: tuple[float, float] | None) -> Tensor:
        """Apply post-norm and residual scale to the output of a module."""
        x = norm(x) if norm else x
        return self._scaled(x, weights[1] if weights else self._residual_scale)

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1 else self._ops.scale(x, factor)
