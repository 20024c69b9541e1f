"""The pre-norm decoder layer that most families share, with attention and MLP made by factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.layers import Attention, AttentionLayer, BuildContext, GatedMLP, MLPLayer, RMSNorm
from penstock.ops import Batch, LayerExport

from .config import ModelConfig

AttentionFactory = Callable[[BuildContext, ModelConfig, int, str], AttentionLayer]
"""Makes the attention of a layer from its number and its name in the checkpoint."""
MLPFactory = Callable[[BuildContext, ModelConfig, int, str], MLPLayer]
"""Makes the MLP of a layer from its number and its name in the checkpoint."""


def grouped_query_attention(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
    """``Attention`` with the options of the configuration; full attention in layers behind ``num_layers`` (MTP)."""
    return Attention(
        context,
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings),
        window=config.sliding_windows[layer] if layer < config.num_layers else 0,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
    )


def gated_mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
    """``GatedMLP`` with the sizes of the configuration."""
    return GatedMLP(context, name, config.hidden_size, config.intermediate_size, config.mlp_bias)


class DecoderLayer:
    """Attention and MLP, each behind a norm, on one residual stream.

    Args:
        number: of the layer. The last layer of the model goes on with ``batch.logits_indices`` only, once it has
            stored the keys and values of all tokens: nothing reads the other tokens' hidden states.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        number: int,
        attention: AttentionFactory,
        mlp: MLPFactory,
    ) -> None:
        name = f"model.layers.{number}"
        self._ops = context.ops
        self._last = number == config.num_layers - 1
        self._input_norm = RMSNorm(context, f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = attention(context, config, number, f"{name}.self_attn")
        self._post_attention_norm = RMSNorm(
            context, f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self._mlp = mlp(context, config, number, f"{name}.mlp")

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch, export: LayerExport | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer.

        Args:
            x: ``[tokens, hidden]``, the output of the layer before, not yet added to the residual stream.
            residual: the stream, None before the first layer.
            export: as of ``AttentionLayer``.

        Returns:
            The MLP's output and the stream, not yet added; ``[rows, hidden]`` each from the last layer.
        """
        x, residual = (self._input_norm(x), x) if residual is None else self._input_norm.add(x, residual)
        x = self.attention(x, cache, batch, self._last, export)
        if self._last:
            residual = self._ops.index_select(residual, batch.logits_indices)
        x, residual = self._post_attention_norm.add(x, residual)
        return self._mlp(x, batch.logits_lora_slots if self._last else batch.lora_slots), residual
