"""The interface of models: what the engine calls, for every family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.layers import LoRATarget
from penstock.ops import Batch, KVSpec, LayerExport, TransferLayout

from .config import ModelConfig


class MTPHead(Protocol):
    """A layer that predicts the token after the next one (multi-token prediction)."""

    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        """Hidden states ``[tokens, hidden]`` whose logits are those of the token after the next one.

        Args:
            batch: token ids are the *next* tokens, each at the position of the token before it.
            states: ``[tokens, hidden]``, what the model, or the head before this one, computed of those tokens before.
            cache: this layer's entry of the KV cache.
        """
        ...


class Model(Protocol):
    """A decoder on one rank: token ids and a KV cache to hidden states, and hidden states to logits."""

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
    mtp_heads: Sequence[MTPHead]

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        """The KV cache entry of each layer, those of ``mtp_heads`` last."""
        ...

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        """The place in a transfer buffer of each of this stage's layers, without those of ``mtp_heads``."""
        ...

    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        """Final hidden states of ``batch.logits_indices``, ``[rows, hidden]``; stores keys and values of all tokens.
        A pipeline stage before the last returns the residual stream after its layers, ``[tokens, hidden]``; those
        after the first begin with ``batch.hidden_states``.

        Args:
            export: of each of this stage's layers, for batches with ``export_places``; empty where there are none.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """In the last stage: ``[rows, hidden]`` to ``[rows, vocabulary]`` float32."""
        ...

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        """In the last stage: ``[rows, hidden]`` to the token of the largest logit, ``[rows]`` int64, without computing
        all logits.

        Args:
            bitmask: ``[rows, ceil(vocabulary / 32)]`` int32, a bit for each allowed token; None allows all.
        """
        ...
