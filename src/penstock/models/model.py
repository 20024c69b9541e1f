"""Interface of models, for all families."""

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
    """Interface of language model heads."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocabulary]`` float32."""
        ...

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        """Token with the largest logit, ``[rows, hidden]`` to ``[rows]`` int64, without storing all logits.

        Args:
            bitmask: ``[rows, ceil(vocabulary / 32)]`` int32 with a bit for each allowed token; None: all are allowed.
        """
        ...


class DraftHead(LanguageModelHead, Protocol):
    """Interface of draft heads, which predict later tokens from the model's hidden states: the token after the next one
    (MTP layer, EAGLE), or one further token each (Medusa). ``logits`` and ``argmax`` take the result of ``forward``."""

    @property
    def attention(self) -> AttentionLayer | None:
        """Attention layer of the head; None if it has no KV cache."""
        ...

    @property
    def recurrent(self) -> bool:
        """True if the head predicts any number of tokens, each from the result of ``forward`` for the previous one."""
        ...

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        """Convert hidden states of the model to ``states`` of ``forward``, ``[tokens, hidden]``.

        Args:
            states: ``[tokens, hidden]``; if the model has ``aux_hidden_state_layers``, the hidden states of these
                layers, concatenated.
        """
        ...

    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        """Hidden states of ``batch.logits_indices``, ``[rows, hidden]``, for the prediction of the token after the next
        one.

        Args:
            batch: batch whose token ids are the *next* tokens, each at the position of the token before it.
            states: ``[tokens, hidden]``: states of the tokens before these, from the model (``combine_hidden_states``)
                or the previous head.
            cache: KV cache of this head.
        """
        ...


class Model(LanguageModelHead, Protocol):
    """A model on one rank. It computes hidden states from token ids and a KV cache, and, in the last pipeline stage,
    logits from hidden states."""

    config: ModelConfig
    dtype: torch.dtype
    """Dtype of the computation."""
    max_len: int
    """Maximum sequence length in tokens."""
    weights_version: str
    """Digest of the weights, the same on every machine; part of the prefix cache's keys."""
    layers: range
    """Indices of the layers of this pipeline stage."""
    lora_targets: Mapping[str, LoRATarget | None]
    """Matrices that LoRA adapters may change, by name in the checkpoint; None: in another pipeline stage."""
    mapped_bytes: int
    """Bytes of packed weights that are mapped from disk. The system counts them as free memory, since it could read
    them again, but every step needs them."""
    heads: Mapping[str, PoolerHead]
    """Heads after pooling, in the last stage: ``classifier``, and ``dense`` (layers of sentence-transformers)."""
    draft_heads: Sequence[DraftHead]
    """Draft heads: the MTP layers of the checkpoint, or those of ``load_draft_heads``. Their keys and values are in the
    model's KV cache."""
    aux_hidden_state_layers: Sequence[int]
    """Indices of the layers whose input is returned for draft heads (``Batch.aux_hidden_states``)."""
    vision: VisionTower | None
    """Vision tower; None for text models. Batches with images have ``hidden_states``, from ``VisionTower.embed`` and
    image features."""

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        """Shapes of the KV caches of all layers, followed by those of ``draft_heads``."""
        ...

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        """Layouts of this stage's layers in a transfer buffer, without those of ``draft_heads``."""
        ...

    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        """Compute the layers, and store keys and values of all tokens.

        The last pipeline stage returns final hidden states of ``batch.logits_indices``, ``[rows, hidden]``; other
        stages return the residual stream, ``[tokens, hidden]``. The input is ``batch.hidden_states``; in the first
        stage, if it is None, the embeddings of ``batch.token_ids``.

        Args:
            export: one for each of this stage's layers, for batches with ``export_places``; empty: no export.
        """
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens, ``[tokens]`` int64 to ``[tokens, hidden]``, which the caller may modify. Only in the first
        pipeline stage."""
        ...


class BaseModel:
    """Base class with the attributes of a ``Model``, with empty values for optional ones."""

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
