"""The pre-norm decoder that most families share, with attention and MLP made by factories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.layers import (
    Attention,
    AttentionLayer,
    BuildContext,
    Embedding,
    GatedMLP,
    LoRATarget,
    MLPLayer,
    RMSNorm,
    rope_table,
)
from penstock.ops import Batch, KVSpec

from .config import ModelConfig
from .model import MTPHead
from .mtp import DecoderMTPHead

AttentionFactory = Callable[[BuildContext, ModelConfig, int, str, Tensor], AttentionLayer]
"""Makes the attention of a layer from its number, its name in the checkpoint, and the rope table."""
MLPFactory = Callable[[BuildContext, ModelConfig, int, str], MLPLayer]
"""Makes the MLP of a layer from its number and its name in the checkpoint."""


def grouped_query_attention(
    context: BuildContext, config: ModelConfig, layer: int, name: str, rope: Tensor
) -> AttentionLayer:
    """``Attention`` with the switches of the configuration; full attention in layers behind ``num_layers`` (MTP)."""
    return Attention(
        context,
        name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=rope,
        window=config.windows[layer] if layer < config.num_layers else 0,
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
        rope: Tensor,
        attention: AttentionFactory,
        mlp: MLPFactory,
    ) -> None:
        name = f"model.layers.{number}"
        self._ops = context.ops
        self._last = number == config.num_layers - 1
        self._input_norm = RMSNorm(context, f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = attention(context, config, number, f"{name}.self_attn", rope)
        self._post_attention_norm = RMSNorm(
            context, f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self._mlp = mlp(context, config, number, f"{name}.mlp")

    def __call__(self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the layer.

        Args:
            x: ``[tokens, hidden]``, the output of the layer before, not yet added to the residual stream.
            residual: the stream, None before the first layer.

        Returns:
            The MLP's output and the stream, not yet added; ``[rows, hidden]`` each from the last layer.
        """
        x, residual = (self._input_norm(x), x) if residual is None else self._input_norm.add(x, residual)
        x = self.attention(x, cache, batch, self._last)
        if self._last:
            residual = self._ops.index_select(residual, batch.logits_indices)
        x, residual = self._post_attention_norm.add(x, residual)
        return self._mlp(x, batch.logits_lora_slots if self._last else batch.lora_slots), residual


class Decoder:
    """A ``Model``.

    Args:
        max_len: tokens that a sequence may have.
        num_mtp_heads: layers for multi-token prediction to load.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        max_len: int,
        num_mtp_heads: int = 0,
        attention: AttentionFactory = grouped_query_attention,
        mlp: MLPFactory = gated_mlp,
    ) -> None:
        self.config = config
        self.dtype = context.dtype
        self.max_len = max_len
        self.weights_version = context.weights.version
        rope = rope_table(
            config.head_dim, max_len, config.rope_parameters, config.max_position_embeddings, context.device
        )

        def layer(number: int) -> DecoderLayer:
            return DecoderLayer(context, config, number, rope, attention, mlp)

        self._embedding = Embedding(context, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self._layers = [layer(number) for number in range(config.num_layers)]
        self._norm = RMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps)
        self._lm_head = self._embedding
        if not config.tie_word_embeddings and config.has_lm_head:
            self._lm_head = Embedding(context, "lm_head", config.vocab_size, config.hidden_size)
        self._mtp_heads = [
            DecoderMTPHead(context, config, layer, config.num_layers + head, self._embedding)
            for head in range(num_mtp_heads)
        ]
        self.mtp_heads: Sequence[MTPHead] = self._mtp_heads
        self.lora_targets: Mapping[str, LoRATarget] = context.lora_targets
        self.mapped_bytes = context.weight_cache.mapped_bytes if context.weight_cache else 0

    def kv_specs(self, block_size: int, quantized: bool = False) -> list[KVSpec]:
        attentions = [layer.attention for layer in (*self._layers, *(head.layer for head in self._mtp_heads))]
        return [attention.kv_spec(block_size, quantized) for attention in attentions]

    @torch.inference_mode()
    def hidden(self, batch: Batch, cache: list[Any]) -> Tensor:
        x, residual = self._embedding(batch.token_ids), None
        for layer, layer_cache in zip(self._layers, cache, strict=False):  # entries of MTP heads follow
            x, residual = layer(x, residual, layer_cache, batch)
        assert residual is not None
        hidden, _ = self._norm.add(x, residual)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head.logits(hidden)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        return self._lm_head.argmax(hidden, bitmask)


def build_decoder(
    context: BuildContext,
    config: ModelConfig,
    max_len: int,
    num_mtp_heads: int,
    *,
    attention: AttentionFactory = grouped_query_attention,
    mlp: MLPFactory = gated_mlp,
) -> Decoder:
    """``Family.build`` of decoders; a family binds other factories with ``functools.partial``."""
    return Decoder(context, config, max_len, num_mtp_heads, attention, mlp)
