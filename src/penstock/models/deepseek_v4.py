"""DeepSeek-V4 (DeepSeek-AI, 2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext, CompressedAttention, HasState, MixtureOfExperts, StreamWeights
from penstock.ops import Batch, LayerExport, TransferLayout

from .decoder import Decoder
from .experts import feed_forward
from .layer import AttentionFactory, DecoderLayer, MLPFactory, make_norm


class HyperLayer(DecoderLayer):
    """Attention and mixture of experts, each on a weighted sum of the residual streams.

    Args:
        number: index of the layer.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, number: int) -> None:
        name, compressed = f"model.layers.{number}", config.compressed
        assert compressed
        self._ops, self._streams = context.ops, compressed.hyper.streams
        self._last = number == config.num_layers - 1

        def weights(part: str) -> StreamWeights:
            names = f"{name}.hc_{part}_fn", f"{name}.hc_{part}_base", f"{name}.hc_{part}_scale"
            return StreamWeights(context, names, config.hidden_size, compressed.hyper, config.rms_norm_eps)

        self._attention_weights, self._mlp_stream_weights = weights("attn"), weights("ffn")
        self._attention_norm, self._experts_norm = (
            make_norm(context, config, f"{name}.{part}_norm", config.hidden_size) for part in ("attn", "ffn")
        )
        self.attention: CompressedAttention = CompressedAttention(
            context,
            f"{name}.attn",
            number,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            config=compressed,
            max_position_embeddings=config.max_position_embeddings,
            eps=config.rms_norm_eps,
        )
        self.state = None
        experts = feed_forward(context, config, number, f"{name}.mlp")
        assert isinstance(experts, MixtureOfExperts)
        self._experts = experts

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch, export: LayerExport | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See ``DecoderLayer``. ``x`` are the residual streams, ``[tokens, streams * hidden]``, and so is the first
        result."""
        ops, token_ids = self._ops, batch.token_ids
        collapsed, weights = self._attention_weights(x)
        attended = self.attention(self._attention_norm(collapsed), cache, batch, self._last, export)
        if self._last:
            x, weights, token_ids = (ops.index_select(each, batch.logits_indices) for each in (x, weights, token_ids))
        x = ops.mix_streams(attended, x, weights, self._streams)
        collapsed, weights = self._mlp_stream_weights(x)
        x = ops.mix_streams(
            self._experts(self._experts_norm(collapsed), None, token_ids=token_ids), x, weights, self._streams
        )
        return x, None


class DeepseekV4(Decoder):
    """A ``Decoder`` with hyper-connections and compressed attention."""

    def __init__(self, context: BuildContext, config: ModelConfig, num_mtp_heads: int = 0) -> None:
        assert config.compressed
        super().__init__(context, config)
        hyper = config.compressed.hyper
        self._streams = hyper.streams
        if self._is_last:
            prefix = "hc_head" if context.weights.has("hc_head_fn") else "model.hc_head.hc"
            names = f"{prefix}_fn", f"{prefix}_base", f"{prefix}_scale"
            self._head_weights = StreamWeights(
                context, names, config.hidden_size, hyper, config.rms_norm_eps, collapse_only=True
            )

    def _make_layer(
        self, context: BuildContext, number: int, attention: AttentionFactory, mlp: MLPFactory
    ) -> DecoderLayer:
        return HyperLayer(context, self.config, number)

    def _state_layers(self) -> list[HasState]:
        attentions = (layer.attention for layer in self._layers if isinstance(layer, HyperLayer))
        return [attention for attention in attentions if attention.has_state]

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        first, dims = self.kv_specs(slot_tokens, quantization)[0], self.config.entry_dims
        specs = [replace(first, head_dim=first.latent + entry, index_dim=entry) for entry in dims]
        layouts = transfer_layouts(specs, slot_tokens)
        return [layouts[number] for number in self.layers]

    def _enter(self, batch: Batch) -> Tensor:
        streams = x = super()._enter(batch)
        for _ in range(self._streams - 1):
            streams = self._ops.concatenate(streams, x)
        return streams

    def _leave(self, x: Tensor, residual: Tensor | None, batch: Batch) -> Tensor:
        return super()._leave(self._head_weights(x)[0], residual, batch)
