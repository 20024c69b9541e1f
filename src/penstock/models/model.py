"""The interface of models: what the engine calls, for every family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import AttentionLayer, BuildContext, LoRATarget, PoolerHead
from penstock.ops import Batch, KVSpec, LayerExport, TransferLayout

from .vision_tower import VisionTower


class LanguageModelHead(Protocol):
    """Hidden states to logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocabulary]`` float32."""
        ...

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        """``[rows, hidden]`` to the token of the largest logit, ``[rows]`` int64, without computing all logits.

        Args:
            bitmask: ``[rows, ceil(vocabulary / 32)]`` int32, a bit for each allowed token; None allows all.
        """
        ...


class DraftHead(LanguageModelHead, Protocol):
    """What predicts the token after the next one, by the model's hidden states: a layer for multi-token prediction, or
    of EAGLE; or a later token, as Medusa's do. Its ``logits`` and ``argmax`` take what ``forward`` returns."""

    @property
    def attention(self) -> AttentionLayer | None:
        """None if it keeps nothing in the KV cache."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether it predicts any number of further tokens, from what ``forward`` has returned for the ones before."""
        ...

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        """What the model computed of some tokens as ``states`` of ``forward``, ``[tokens, hidden]``.

        Args:
            states: ``[tokens, hidden]``; where the model has ``aux_hidden_state_layers`` the hidden states of these,
                one beside the other.
        """
        ...

    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        """Hidden states of ``batch.logits_indices``, ``[rows, hidden]``, of which the token after the next one is
        predicted.

        Args:
            batch: token ids are the *next* tokens, each at the position of the token before it.
            states: ``[tokens, hidden]``, what the model (``combine_hidden_states``) or the head before this one
                computed of those tokens before.
            cache: this layer's entry of the KV cache.
        """
        ...


class Model(LanguageModelHead, Protocol):
    """A decoder on one rank: token ids and a KV cache to hidden states, and in the last pipeline stage hidden states to
    logits."""

    config: ModelConfig
    dtype: torch.dtype
    """Dtype of the computation."""
    max_len: int
    """Tokens that a sequence may have."""
    weights_version: str
    """Identifies the contents of the weights on any machine; part of the prefix cache's keys."""
    layers: range
    """Numbers of the layers that this pipeline stage computes."""
    lora_targets: Mapping[str, LoRATarget | None]
    """The checkpoint's matrices that LoRA adapters may add to, by name; None for those of other pipeline stages."""
    mapped_bytes: int
    """Bytes of packed weights that are mapped from disk. The system counts them as free memory, as it could read them
    again, but every step needs them."""
    heads: Mapping[str, PoolerHead]
    """In the last stage, what comes after pooling: ``classifier``, ``dense`` (layers of sentence-transformers)."""
    draft_heads: Sequence[DraftHead]
    """Of the checkpoint's own layers for multi-token prediction, or set by ``load_draft_heads``. Their keys and values
    are in the model's KV cache."""
    aux_hidden_state_layers: Sequence[int]
    """Numbers of the layers before which the residual stream is returned (``Batch.aux_hidden_states``)."""
    vision: VisionTower | None
    """Of a model that sees images: its batches have ``hidden_states``, made of ``VisionTower.embed`` and features."""

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        """The KV cache entry of each layer, those of ``draft_heads`` last."""
        ...

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        """The place in a transfer buffer of each of this stage's layers, without those of ``draft_heads``."""
        ...

    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        """Final hidden states of ``batch.logits_indices``, ``[rows, hidden]``; stores keys and values of all tokens.
        A pipeline stage before the last returns the residual stream after its layers, ``[tokens, hidden]``; those
        after the first begin with ``batch.hidden_states``, as the first does where there are any.

        Args:
            export: of each of this stage's layers, for batches with ``export_places``; empty if there are none.
        """
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of tokens: ``[tokens]`` int64 to ``[tokens, hidden]``, which the caller may change. In the first
        pipeline stage."""
        ...


class BaseModel:
    """The attributes of a ``Model``, without anything that is optional."""

    def __init__(self, context: BuildContext, config: ModelConfig) -> None:
        self.config = config
        self.dtype = context.dtype
        self.max_len = context.max_len
        self.weights_version = context.weights.version
        self.layers = context.layers or range(config.num_layers)
        self.lora_targets: Mapping[str, LoRATarget | None] = {}
        self.mapped_bytes = 0
        self.heads: Mapping[str, PoolerHead] = {}
        self.draft_heads: Sequence[DraftHead] = ()
        self.aux_hidden_state_layers: Sequence[int] = ()
        self.vision: VisionTower | None = None
        self._ops = context.ops
