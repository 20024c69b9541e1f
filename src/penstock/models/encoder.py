"""The encoder of all encoder families: embeddings and layers with bidirectional attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.core import Code, PenstockError
from penstock.layers import (
    BidirectionalAttention,
    BuildContext,
    Embedding,
    LayerNorm,
    MLPLayer,
)
from penstock.ops import Batch, KVSpec, LayerExport, Ops, TransferLayout
from penstock.quant import PackedMatrix

from .loading import track_layers
from .model import BaseModel

NO_HEAD = "an encoder has no language model head: use the embeddings, rerank or classification API"


class EncoderLayer(Protocol):
    """Interface of an encoder's layers."""

    @property
    def attention(self) -> BidirectionalAttention: ...

    def __call__(self, x: Tensor, cache: Any, batch: Batch) -> Tensor:
        """Compute the layer, ``[tokens, hidden]`` to ``[tokens, hidden]``. The last layer of a model only returns the
        rows ``batch.logits_indices``, ``[rows, hidden]``. May modify ``x``."""
        ...


@dataclass(frozen=True)
class PostNormLayer:
    """Post-norm layer, as in the original Transformer (Vaswani et al., 2017): BERT, RoBERTa, GTE."""

    ops: Ops
    attention: BidirectionalAttention
    attention_norm: LayerNorm
    mlp: MLPLayer
    mlp_norm: LayerNorm
    last: bool

    def __call__(self, x: Tensor, cache: Any, batch: Batch) -> Tensor:
        attended = self.attention(x, cache, batch, self.last)
        if self.last:
            x = self.ops.index_select(x, batch.logits_indices)
        x, _ = self.attention_norm.add(attended, x)
        x, _ = self.mlp_norm.add(self.mlp(x, None), x)
        return x


@dataclass(frozen=True)
class PreNormLayer:
    """Pre-norm layer of ModernBERT. The first layer has no norm before attention."""

    ops: Ops
    attention: BidirectionalAttention
    attention_norm: LayerNorm | None
    mlp: MLPLayer
    mlp_norm: LayerNorm
    last: bool

    def __call__(self, x: Tensor, cache: Any, batch: Batch) -> Tensor:
        normed = self.attention_norm(x) if self.attention_norm else x
        attended = self.attention(normed, cache, batch, self.last)
        if self.last:
            x = self.ops.index_select(x, batch.logits_indices)
        normed, x = self.mlp_norm.add(attended, x)
        return self.ops.add_residual(self.mlp(normed, None), x)


class Encoder(BaseModel):
    """A ``Model`` whose hidden states are pooled, without a language model head.

    Args:
        embeddings: name of the token embedding.
        embedding_norm, final_norm: names of the norms before and after the layers; None: no final norm.
        added: learned position and type embeddings, ``[token types * max_len, hidden]``, indexed by position. The
            positions of a second text start at ``max_len``. None: the model has no such embeddings.
        layer: builds a layer from its index.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        *,
        embeddings: str,
        embedding_norm: str,
        norm_bias: bool,
        added: Tensor | None,
        layer: Callable[[int], EncoderLayer],
        final_norm: str | None = None,
    ) -> None:
        if context.max_loras:
            message = "LoRA adapters are not supported for encoders: leave enable_lora out"
            raise PenstockError(Code.UNSUPPORTED, message, "enable_lora")
        super().__init__(context, config)
        self._is_first, self._is_last = self.layers.start == 0, self.layers.stop == config.num_layers
        size, eps = config.hidden_size, config.rms_norm_eps
        if self._is_first:
            self._embedding = Embedding(context, embeddings, config.vocab_size, size)
            self._embedding_norm = LayerNorm(context, embedding_norm, size, eps, norm_bias)
            self._added = None
            if added is not None and not context.output:
                self._added = PackedMatrix(context.ops, context.ops.pack([added.to(context.dtype)]))
        self._layers = [layer(number) for number in track_layers(context, self.layers)]
        self._final_norm = None
        if self._is_last and final_norm:
            self._final_norm = LayerNorm(context, final_norm, size, eps, norm_bias)
        if context.weight_cache:
            self.mapped_bytes = context.weight_cache.mapped_bytes

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        if quantization:
            message = f"is {quantization}, but an encoder has no persistent KV cache: set kv_cache_dtype to auto"
            raise PenstockError(Code.UNSUPPORTED, message, "kv_cache_dtype")
        return [self._layers[0].attention.kv_spec(block_size)]

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        return []

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        x = self._embed(batch) if self._is_first else batch.hidden_states
        assert x is not None
        for layer in self._layers:
            x = layer(x, cache[0], batch)
        return self._final_norm(x) if self._final_norm else x

    def _embed(self, batch: Batch) -> Tensor:
        x = self._embedding(batch.token_ids)
        if self._added is None:
            return self._embedding_norm(x)
        return self._embedding_norm.add(self._added.embedding(batch.positions), x)[0]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        raise PenstockError(Code.UNSUPPORTED, NO_HEAD, "model")

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        raise PenstockError(Code.UNSUPPORTED, NO_HEAD, "model")


def module_name(context: BuildContext, config: ModelConfig, embeddings: str) -> str:
    """Prefix of the encoder's tensor names; empty for files with the encoder only.

    Args:
        embeddings: name of the token embedding, without the prefix.
    """
    assert config.encoder
    prefixes = (f"{config.encoder.prefix}.", "new.")  # the publisher's GTE files have the prefix "new."
    return next((prefix for prefix in prefixes if context.weights.has(f"{prefix}{embeddings}.weight")), "")


def position_and_type_table(
    context: BuildContext, config: ModelConfig, name: str, first: int = 0, learned_positions: bool = True
) -> Tensor | None:
    """Sums of position and type embeddings, ``[token types * max_len, hidden]`` float32; None if the model has neither.

    Args:
        name: module with ``position_embeddings`` and ``token_type_embeddings``.
        first: position of the first token.
    """
    assert config.encoder
    size, types, length = config.hidden_size, config.encoder.type_vocab_size, context.max_len
    table = torch.zeros(max(types, 1), length, size, device=context.device)
    if learned_positions:
        shape = (config.max_position_embeddings, size)
        table += context.read_weight(f"{name}.position_embeddings.weight", *shape)[first : first + length].float()
    if types:
        table += context.read_weight(f"{name}.token_type_embeddings.weight", types, size).float()[:, None]
    return table.flatten(0, 1) if learned_positions or types else None
