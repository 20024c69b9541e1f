"""Gemma 4: layers with different heads, shared keys and values, and an embedding of the token for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import (
    Attention,
    AttentionLayer,
    BuildContext,
    ColumnParallelLinear,
    Embedding,
    GatedMLP,
    MixtureOfExperts,
    MLPLayer,
    SharedKVAttention,
)
from penstock.layers.norm import RMSNorm, UnweightedRMSNorm
from penstock.ops import Batch, LayerExport, QKNorms
from penstock.parallel import shard_outputs

from .decoder import Decoder
from .families.gemma4 import has_shared_values, intermediate_size, layer_input_size
from .layer import AttentionFactory, DecoderLayer, MLPFactory, make_norm


def make_attention(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
    """``AttentionFactory`` of Gemma 4."""
    kv_heads, dim = config.kv_heads_of(layer), config.head_dim_of(layer)
    rope, eps = config.rope_of(layer), config.rms_norm_eps
    assert rope is not None
    options: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "rope": context.rope_table(dim, rope, config.max_position_embeddings),
        "window": config.sliding_windows[layer],
        "qkv_bias": config.qkv_bias,
        "output_bias": config.output_bias,
        "scale": config.options.attention_scale,
    }
    q_norm = RMSNorm(context, f"{name}.q_norm", dim, eps, float32=True)
    if not config.has_kv(layer):
        return SharedKVAttention(context, name, query_norm=q_norm, **options)
    k_norm = RMSNorm(context, f"{name}.k_norm", dim, eps, float32=True)
    return Attention(
        context,
        name,
        qk_norms=QKNorms(q_norm.weight, k_norm.weight, eps),
        projections="qk" if has_shared_values(config, layer) else "qkv",
        value_norm=UnweightedRMSNorm(context, dim, eps),
        **options,
    )


def make_mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
    """``MLPFactory`` of Gemma 4."""
    size = intermediate_size(config, layer)
    mlp = GatedMLP(context, name, config.hidden_size, size, activation=config.options.activation)
    return MLPAndExperts(context, config, layer, name.removesuffix(".mlp"), mlp) if config.experts else mlp


class RouterNorm(RMSNorm):
    """RMS norm of a router's input, times a factor.

    Args:
        name: tensor of the weights.
    """

    def __init__(self, context: BuildContext, name: str, size: int, eps: float, factor: float) -> None:
        self._ops, self._eps = context.ops, eps
        self.weight = context.read_weight(name, size).float() * factor


class MLPAndExperts:
    """An ``MLPLayer``: the sum of an MLP and a mixture of experts, each with norms of its input and its output.

    Args:
        name: layer in the checkpoint.
        mlp: the MLP.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, layer: int, name: str, mlp: MLPLayer) -> None:
        hidden, eps, experts = config.hidden_size, config.rms_norm_eps, config.experts
        assert experts
        self._ops, self._mlp = context.ops, mlp
        self._before_mlp, self._after_mlp, self._before_experts, self._after_experts = (
            make_norm(context, config, f"{name}.{part}", hidden)
            for part in (
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        )
        self._router_norm = RouterNorm(context, f"{name}.router.scale", hidden, eps, hidden**-0.5)
        self._experts = MixtureOfExperts(
            context,
            name,
            hidden,
            experts.num_experts,
            experts.intermediate_size,
            experts.routing,
            activation=config.options.activation,
            router=experts.router,
            expert_factors=context.read_weight(f"{name}.router.per_expert_scale", experts.num_experts).float(),
            layer=layer,
        )

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """See ``MLPLayer``; ``x`` is the residual stream."""
        dense = self._after_mlp(self._mlp(self._before_mlp(x), lora_slots))
        routed = self._experts(self._before_experts(x), lora_slots, self._router_norm(x))
        return self._ops.add_residual(dense, self._after_experts(routed))


class LayerInputs:
    """Inputs of each layer that depend on a token and its embedding (per-layer embeddings).

    Args:
        size: elements per layer.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, size: int) -> None:
        self._ops, self._size, self._layers = context.ops, size, config.num_layers
        total = config.num_layers * size
        self._embedding = Embedding(context, "model.embed_tokens_per_layer", config.vocab_size, total)
        shards = [shard_outputs(context.group, total)]
        name = "model.per_layer_model_projection"
        self._projection = ColumnParallelLinear(context, [name], config.hidden_size, shards, gather_output=True)
        self._norm = make_norm(context, config, "model.per_layer_projection_norm", size)
        self._scale = config.hidden_size**-0.5
        self._inputs: Tensor | None = None

    def compute(self, token_ids: Tensor, embedded: Tensor, lora_slots: Tensor | None) -> None:
        """Compute the inputs of all layers for the current forward pass.

        Args:
            embedded: scaled embedding of the tokens, ``[tokens, hidden]``.
        """
        projected = self._ops.scale(self._projection(embedded, lora_slots), self._scale)
        normed = self._norm(projected.unflatten(-1, (self._layers, self._size))).flatten(-2)
        rows = self._ops.scale(self._embedding(token_ids), self._size**0.5)
        self._inputs = self._ops.scale(self._ops.add_residual(normed, rows), 2**-0.5)

    def __getitem__(self, layer: int) -> Tensor:
        """Inputs of a layer, ``[tokens, size]``, in the current forward pass."""
        assert self._inputs is not None
        return self._inputs[:, layer * self._size : (layer + 1) * self._size]


class LayerInput:
    """Gated input of a layer from ``LayerInputs``, added to the residual stream after the MLP.

    Args:
        name: layer in the checkpoint.
        number: index of the layer.
    """

    def __init__(
        self, context: BuildContext, config: ModelConfig, name: str, number: int, inputs: LayerInputs, size: int
    ) -> None:
        self._ops, self._inputs, self._number = context.ops, inputs, number
        self._activation, hidden = config.options.activation, config.hidden_size
        self._gate, self._projection = (
            ColumnParallelLinear(
                context, [f"{name}.{part}"], width, [shard_outputs(context.group, outputs)], False, True
            )
            for part, width, outputs in (("per_layer_input_gate", hidden, size), ("per_layer_projection", size, hidden))
        )
        self._norm = make_norm(context, config, f"{name}.post_per_layer_input_norm", hidden)

    def __call__(self, x: Tensor, lora_slots: Tensor | None, rows: Tensor | None) -> Tensor:
        """Compute the input for ``x``, ``[tokens, hidden]``. ``rows``: indices of the tokens of ``x``; None: all."""
        given = self._inputs[self._number]
        given = given if rows is None else self._ops.index_select(given, rows)
        gated = self._ops.multiply(given, self._gate(x, lora_slots), self._activation)
        return self._norm(self._projection(gated, lora_slots))


class Gemma4Layer(DecoderLayer):
    """A decoder layer, whose output is the whole residual stream, times a scalar.

    Args:
        number: index of the layer.
        inputs: None for models without ``LayerInputs``.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        number: int,
        attention: AttentionFactory,
        mlp: MLPFactory,
        inputs: LayerInputs | None,
    ) -> None:
        super().__init__(context, config, number, attention, mlp)
        name = f"model.layers.{number}"
        self._input = inputs and LayerInput(context, config, name, number, inputs, layer_input_size(config))
        self._factor = context.read_weight(f"{name}.layer_scalar", 1).item()

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch, export: LayerExport | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See ``DecoderLayer``. The residual stream is returned as the first result."""
        x, residual = super().__call__(x, residual, cache, batch, export)
        assert residual is not None
        stream = self._ops.add_residual(x, residual)
        if self._input:
            slots = batch.logits_lora_slots if self._last else batch.lora_slots
            added = self._input(stream, slots, batch.logits_indices if self._last else None)
            stream = self._ops.add_residual(added, stream)
        return self._scaled(stream, self._factor), None


class Gemma4(Decoder):
    """A ``Decoder`` of Gemma 4."""

    def __init__(
        self, context: BuildContext, config: ModelConfig, num_mtp_heads: int = 0, mlp: MLPFactory = make_mlp
    ) -> None:
        size = layer_input_size(config)
        self._inputs = LayerInputs(context, config, size) if size else None
        self.embeds_in_all_stages = size > 0
        super().__init__(context, config, num_mtp_heads, make_attention, mlp)

    def _make_layer(
        self, context: BuildContext, number: int, attention: AttentionFactory, mlp: MLPFactory
    ) -> DecoderLayer:
        return Gemma4Layer(context, self.config, number, attention, mlp, self._inputs)

    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        if self._inputs:
            self._inputs.compute(batch.token_ids, self._embed(batch.token_ids), batch.lora_slots)
        return super().forward(batch, cache, export)
