"""Whisper (Radford et al., 2022): an audio encoder, and a decoder with learned positions and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import MLP, BuildContext, Embedding, LayerNorm
from penstock.layers.vision import Linear
from penstock.ops import AttentionOptions, Batch, CrossAttention, KVSpec, LayerExport, TransferLayout
from penstock.quant import PackedMatrix

from .model import BaseModel
from .vision_tower import tower_context
from .whisper_encoder import EPS, WhisperEncoder


class Whisper(BaseModel):
    """A ``Model`` that transcribes audio. Its batches have ``cross_attention``."""

    def __init__(self, context: BuildContext, config: ModelConfig) -> None:
        assert config.speech
        super().__init__(context, config)
        size = config.hidden_size
        self._encoder = WhisperEncoder(tower_context(context), "model.encoder", config.speech, size)
        name = "model.decoder"
        self._embedding = Embedding(context, f"{name}.embed_tokens", config.vocab_size, size)
        positions = context.read_weight(f"{name}.embed_positions.weight", config.max_position_embeddings, size)
        self._positions = PackedMatrix(context.ops, context.ops.pack([positions]))
        self._layers = [_Layer(context, config, f"{name}.layers.{number}") for number in self.layers]
        self._norm = LayerNorm(context, f"{name}.layer_norm", size, EPS, bias=True)
        tied = config.tie_word_embeddings
        self._lm_head = self._embedding if tied else Embedding(context, "proj_out", config.vocab_size, size)
        self.mapped_bytes = context.weight_cache.mapped_bytes if context.weight_cache else 0

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        dtype, config = str(self.dtype).removeprefix("torch."), self.config
        spec = KVSpec(config.num_kv_heads, config.head_dim, dtype, block_size, quantization=quantization)
        return [spec] * config.num_layers

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        return transfer_layouts(self.kv_specs(slot_tokens, quantization), slot_tokens)

    @torch.inference_mode()
    def encode(self, features: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Encode a window of audio. Returns keys and values for each decoder layer, ``[positions, heads, head_dim]``.

        Args:
            features: log-mel features, ``[bins, frames]`` float32.
        """
        states = self._encoder(features)
        return [layer.cross_attention.keys_and_values(states) for layer in self._layers]

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        cross = batch.cross_attention
        x = self._ops.add_residual(self._positions.embedding(batch.positions), self._embedding(batch.token_ids))
        if cross is None:  # profiling and probing steps have no audio
            return self._norm(self._ops.index_select(x, batch.logits_indices))
        for number, (layer, self_cache, cross_cache) in enumerate(zip(self._layers, cache, cross.cache, strict=True)):
            x = layer(x, batch, self_cache, cross_cache, cross, number)
        return self._norm(self._ops.index_select(x, batch.logits_indices))

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head.logits(hidden)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        return self._lm_head.argmax(hidden, bitmask)


class _Attention:
    """Projections of an attention layer. Keys have no bias."""

    def __init__(self, context: BuildContext, config: ModelConfig, name: str) -> None:
        size = config.hidden_size
        self._shape = (config.num_heads, config.head_dim)
        self._q, self._k, self._v = (
            Linear(context, f"{name}.{part}_proj", size, size, bias=part != "k") for part in "qkv"
        )
        self.output = Linear(context, f"{name}.out_proj", size, size)

    def queries(self, x: Tensor) -> Tensor:
        """Project ``[tokens, size]`` to queries, ``[tokens, heads, head_dim]``."""
        queries: Tensor = self._q(x).unflatten(-1, self._shape)
        return queries

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project ``[tokens, size]`` to keys and values, ``[tokens, heads, head_dim]`` each."""
        return self._k(x).unflatten(-1, self._shape), self._v(x).unflatten(-1, self._shape)


class _Layer:
    """Decoder layer: self-attention, cross-attention and MLP, with pre-norm."""

    def __init__(self, context: BuildContext, config: ModelConfig, name: str) -> None:
        size = config.hidden_size
        self._ops = context.ops
        self._scale = config.head_dim**-0.5
        self._self_attention = _Attention(context, config, f"{name}.self_attn")
        self.cross_attention = _Attention(context, config, f"{name}.encoder_attn")
        norms = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
        self._norms = [LayerNorm(context, f"{name}.{norm}", size, EPS, bias=True) for norm in norms]
        names = (f"{name}.fc1", f"{name}.fc2")
        self._mlp = MLP(context, names, size, config.intermediate_size, True, config.options.activation)

    def __call__(
        self, x: Tensor, batch: Batch, self_cache: Any, cross_cache: Any, cross: CrossAttention, number: int
    ) -> Tensor:
        """Compute the layer, ``[tokens, size]`` to ``[tokens, size]``.

        Args:
            self_cache, cross_cache: KV caches of self-attention and cross-attention in this layer.
            number: index of the layer.
        """
        attention, ops = self._self_attention, self._ops
        normed = self._norms[0](x)
        k, v = attention.keys_and_values(normed)
        ops.store_kv(self_cache, k, v, batch.slot_mapping)
        attended = ops.attention(attention.queries(normed), self_cache, batch.attention, AttentionOptions(self._scale))
        normed, x = self._norms[1].add(attention.output(attended), x)
        attention = self.cross_attention
        queries = attention.queries(normed)
        if number in cross.recorded_layers:
            cross.queries[number] = queries
        attended = ops.attention(queries, cross_cache, cross.attention, AttentionOptions(self._scale, causal=False))
        normed, x = self._norms[2].add(attention.output(attended), x)
        return ops.add_residual(self._mlp(normed, None), x)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Whisper:
    return Whisper(context, config)
