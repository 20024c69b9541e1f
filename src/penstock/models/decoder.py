"""The decoder of most families: embedding, layers, language model head, and MTP heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from penstock.checkpoint.decoder_options import DecoderOptions
from penstock.checkpoint.kv_spec import transfer_layouts
from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.layers import (
    BuildContext,
    Embedding,
    HasState,
)
from penstock.ops import Batch, KVSpec, LayerExport, TransferLayout
from penstock.parallel import shard_heads

from .experts import feed_forward
from .layer import AttentionFactory, DecoderLayer, MLPFactory, make_attention, make_norm
from .loading import track_layers
from .model import BaseModel
from .mtp import DecoderMTPHead


class Decoder(BaseModel):
    """A ``Model`` of decoder layers.

    Args:
        num_mtp_heads: number of layers for multi-token prediction to load.
        attention, mlp: factories of the attention and the MLP in each layer.
    """

    embeds_in_all_stages = False
    """All pipeline stages have the embedding."""

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        num_mtp_heads: int = 0,
        attention: AttentionFactory = make_attention,
        mlp: MLPFactory = feed_forward,
    ) -> None:
        super().__init__(context, config)

        def layer(number: int) -> DecoderLayer:
            return self._make_layer(context, number, attention, mlp)

        self._expert_load = context.expert_load
        self._embedding_scale = float(torch.tensor(config.options.embedding_scale, dtype=context.dtype))
        self._group = context.group
        with_kv = filter(config.has_kv, self.layers)
        self._kv_indices = {number: index for index, number in enumerate(with_kv)}
        """Index of the KV cache of each layer with keys and values."""
        self._is_first, self._is_last = self.layers.start == 0, self.layers.stop == config.num_layers
        tied = config.tie_word_embeddings or not config.has_lm_head
        if self._is_first or (self._is_last and tied) or self.embeds_in_all_stages:
            self._embedding = Embedding(context, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self._embedding_norm = (
            make_norm(context, config, "model.embed_norm", config.hidden_size)
            if config.options.embedding_norm and (self._is_first or self.embeds_in_all_stages)
            else None
        )
        self._layers = [layer(number) for number in track_layers(context, self.layers)]
        for index, part in enumerate(self._state_layers()):
            part.state_index = index
        if self._is_last:
            self._norm = make_norm(context, config, "model.norm", config.hidden_size)
            self._lm_head = (
                self._embedding if tied else Embedding(context, "lm_head", config.vocab_size, config.hidden_size)
            )
        self.draft_heads = [
            DecoderMTPHead(context, config, layer, config.num_layers + head, proxy(self))
            for head in range(num_mtp_heads)
        ]
        lora_targets, others = context.lora_targets, set(range(config.num_layers)).difference(self.layers)
        self.lora_targets = {
            **lora_targets,
            **dict.fromkeys(_in_layers(lora_targets, others)),
        }
        self.mapped_bytes = context.weight_cache.mapped_bytes if context.weight_cache else 0

    def _make_layer(
        self, context: BuildContext, number: int, attention: AttentionFactory, mlp: MLPFactory
    ) -> DecoderLayer:
        return DecoderLayer(context, self.config, number, attention, mlp)

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        head_attentions = [head.attention for head in self.draft_heads]
        layers = zip(self.layers, self._layers, strict=True)
        attentions = [*(layer.attention for number, layer in layers if self.config.has_kv(number)), *head_attentions]
        return [attention.kv_spec(block_size, quantization) for attention in attentions if attention]

    def state_specs(self) -> list[StateSpec]:
        return [part.state_spec() for part in self._state_layers()]

    def _state_layers(self) -> list[HasState]:
        return [layer.state for layer in self._layers if layer.state]

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        config, specs = self.config, self.kv_specs(slot_tokens, quantization)
        if not specs:
            return []
        numbers = list(filter(config.has_kv, range(config.num_layers)))
        whole = [replace(specs[0], kv_heads=config.kv_heads_of(number)) for number in numbers]
        if config.layer_heads:
            dims = map(config.head_dim_of, numbers)
            whole = [replace(spec, head_dim=dim) for spec, dim in zip(whole, dims, strict=True)]
        # The first layer of a stage has index keys (split_layers).
        whole = [
            spec.without_index_keys() if number in config.shared_layers else spec
            for number, spec in zip(numbers, whole, strict=True)
        ]
        return [
            replace(layout, first_head=self._first_kv_head(layout.kv_heads))
            for number, layout in zip(numbers, transfer_layouts(whole, slot_tokens), strict=True)
            if number in self.layers
        ]

    def _first_kv_head(self, kv_heads: int) -> int:
        """First KV head of this rank, in a layer with ``kv_heads``."""
        return shard_heads(self._group, self.config.num_heads, kv_heads)[1].first

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        x, residual = batch.hidden_states, None
        if self._expert_load:
            self._expert_load.num_tokens = batch.attention.query_start_loc[-1:]
        if x is None:
            x = self._enter(batch)
        aux_hidden_states = list[Tensor]()
        for number, layer in zip(self.layers, self._layers, strict=True):
            index = self._kv_indices.get(self.config.kv_source(number))
            layer_cache = None if index is None else cache[index]
            layer_export = export[index] if export and index is not None and number in self._kv_indices else None
            if number in self.aux_hidden_state_layers:
                stream = self._ops.clone(x if residual is None else residual)
                aux_hidden_states.append(stream if residual is None else self._ops.add_residual(x, stream))
            x, residual = layer(x, residual, layer_cache, batch, layer_export)
        batch.aux_hidden_states = tuple(aux_hidden_states)
        if not self._is_last:
            return x if residual is None else self._ops.add_residual(x, residual)
        return self._leave(x, residual, batch)

    def _enter(self, batch: Batch) -> Tensor:
        """The residual stream before the first layer; several streams are concatenated."""
        return self._embed(batch.token_ids)

    def _leave(self, x: Tensor, residual: Tensor | None, batch: Batch) -> Tensor:
        """Final hidden states of ``batch.logits_indices``, from the result of the last layer."""
        return self._norm(x) if residual is None else self._norm.add(x, residual)[0]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed(token_ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits, options = self._lm_head.logits(hidden), self.config.options
        if options.logit_scale == 1 and not options.logit_softcap:
            return logits
        return self._ops.scale(logits, options.logit_scale, options.logit_softcap)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        if _keeps_order(self.config.options):
            return self._lm_head.argmax(hidden, bitmask)
        logits = self.logits(hidden)
        logits = logits if bitmask is None else self._ops.apply_bitmask(logits, bitmask)
        return self._ops.argmax_of_logits(logits)[0]

    def _embed(self, token_ids: Tensor) -> Tensor:
        x = self._embedding(token_ids)
        x = self._embedding_norm(x) if self._embedding_norm else x
        return x if self._embedding_scale == 1 else self._ops.scale(x, self._embedding_scale)


def _keeps_order(options: DecoderOptions) -> bool:
    """Whether scaling keeps the order of logits exactly: the scale is a power of two, and no soft cap is set."""
    return options.logit_softcap == 0 and math.frexp(options.logit_scale)[0] == 0.5


def _in_layers(names: Iterable[str], layers: Iterable[int]) -> set[str]:
    """Tensor names with the layer index replaced by each of ``layers``."""
    return {re.sub(r"(?<=^model\.layers\.)\d+", str(layer), name) for name in names for layer in layers}
