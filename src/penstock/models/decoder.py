"""The decoder that most families share: embedding, layers, language model head, and MTP heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.layers import (
    BuildContext,
    Embedding,
    LoRATarget,
    RMSNorm,
)
from penstock.ops import Batch, KVSpec

from .config import ModelConfig
from .layer import AttentionFactory, DecoderLayer, MLPFactory, gated_mlp, grouped_query_attention
from .model import MTPHead
from .mtp import DecoderMTPHead


class Decoder:
    """A ``Model``.

    Args:
        num_mtp_heads: layers for multi-token prediction to load.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        num_mtp_heads: int = 0,
        attention: AttentionFactory = grouped_query_attention,
        mlp: MLPFactory = gated_mlp,
    ) -> None:
        self.config = config
        self.dtype = context.dtype
        self.max_len = context.max_len
        self.weights_version = context.weights.version

        def layer(number: int) -> DecoderLayer:
            return DecoderLayer(context, config, number, attention, mlp)

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
    num_mtp_heads: int,
    *,
    attention: AttentionFactory = grouped_query_attention,
    mlp: MLPFactory = gated_mlp,
) -> Decoder:
    """``Family.build`` of decoders; a family binds other factories with ``functools.partial``."""
    return Decoder(context, config, num_mtp_heads, attention, mlp)
