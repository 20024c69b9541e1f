"""Interface of models, for all families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.layers import AttentionLayer, BuildContext, LoRATarget, PoolerHead
from penstock.ops import Batch, KVSpec, LayerExport, TransferLayout

from .vision_tower import VisionTower


class LanguageModelHead(Protocol):
    """Interface of language model heads."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, ``[rows, hidden]`` to ``[rows, vocabulary]`` float32."""
        ...

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        """Token with the largest logit, ``[rows, hidden]`` to ``[rows]`` int64, without storing all logits.

        Args:
            bitmask: ``[rows, ceil(vocabulary / 32)]`` int32 with a bit for each allowed token; None: all are allowed.
        """
        ...


class DraftHead(LanguageModelHead, Protocol):
    """Interface of draft heads, which predict later tokens from the model's hidden states: the token after the next
    token (MTP layer, EAGLE), or one token per head, each further ahead (Medusa). ``logits`` and ``argmax`` take the
    result of ``forward``."""

    @property
    def attention(self) -> AttentionLayer | None:
        """Attention layer of the head; None if the head has no KV cache."""
        ...

    @property
    def recurrent(self) -> bool:
        """True if one head predicts all draft tokens, each from the result of ``forward`` for the previous token."""
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
        token.

        Args:
            batch: batch with the *next* token at each position.
            states: ``[tokens, hidden]``: state of the token at each position, from the model
                (``combine_hidden_states``) or the previous head.
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
    """Matrices that LoRA adapters may change, by name in the checkpoint; None: matrix of another pipeline stage."""
    batch_invariant: bool
    """Whether results do not depend on the batch with ``BATCH_INVARIANT`` kernels. False for some models run by
    transformers."""
    mapped_bytes: int
    """Bytes of packed weights that are mapped from disk. The system counts these as free memory, because it can read
    them again, but every step needs them."""
    heads: Mapping[str, PoolerHead]
    """Heads after pooling, in the last stage: ``classifier``, and ``dense`` (layers of sentence-transformers)."""
    draft_heads: Sequence[DraftHead]
    """Draft heads: the MTP layers of the checkpoint, or the result of ``load_draft_heads``. The model's KV cache has
    their keys and values."""
    aux_hidden_state_layers: Sequence[int]
    """Indices of layers; ``forward`` stores their inputs for draft heads in ``Batch.aux_hidden_states``."""
    vision: VisionTower | None
    """Vision tower; None for text models. Batches with images have ``hidden_states``, from ``VisionTower.embed`` and
    image features."""

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        """Shapes of the KV caches of this stage's layers with attention, then of ``draft_heads``."""
        ...

    def state_specs(self) -> list[StateSpec]:
        """Shapes of the recurrent states of this stage's layers."""
        ...

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        """Layouts of this stage's layers with keys and values in a transfer buffer, without ``draft_heads``."""
        ...

    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        """Compute the layers, and store keys and values of all tokens.

        The last pipeline stage returns final hidden states of ``batch.logits_indices``, ``[rows, hidden]``; other
        stages return the residual stream, ``[tokens, hidden]``. The input is ``batch.hidden_states``; in the first
        stage, if it is None, the embeddings of ``batch.token_ids``.

        Args:
            export: one export for each layer of this stage with keys and values, for batches with ``export_places``;
                empty: no export.
        """
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens, ``[tokens]`` int64 to ``[tokens, hidden]``. The caller may modify the result. Only for the
        first pipeline stage."""
        ...


class BaseModel:
    """Base class with the attributes of a ``Model``. Optional attributes are empty."""

    def __init__(self, context: BuildContext, config: ModelConfig) -> None:
        self.config = config
        self.dtype = context.dtype
        self.max_len = context.max_len
        self.weights_version = context.weights.version
        self.layers = context.layers or range(config.num_layers)
        self.lora_targets: Mapping[str, LoRATarget | None] = {}
        self.mapped_bytes = 0
        self.batch_invariant = True
        self.heads: Mapping[str, PoolerHead] = {}
        self.draft_heads: Sequence[DraftHead] = ()
        self.aux_hidden_state_layers: Sequence[int] = ()
        self.vision: VisionTower | None = None
        self._ops = context.ops

    def state_specs(self) -> list[StateSpec]:
        """See ``Model``: no layer has a state."""
        return []
