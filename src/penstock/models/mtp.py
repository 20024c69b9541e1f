"""Heads for multi-token prediction (DeepSeek-AI, 2024): a decoder layer that predicts the token after the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.layers import BuildContext, ColumnParallelLinear, Embedding, RMSNorm
from penstock.ops import Batch
from penstock.parallel import shard_outputs

from .config import ModelConfig
from .layer import DecoderLayer


class DecoderMTPHead:
    """A ``DraftHead`` made of a decoder layer. It shares the model's embedding and language model head.

    Args:
        make_layer: makes the decoder layer of a number.
        number: of its layer in the checkpoint.
    """

    recurrent = True

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        make_layer: Callable[[int], DecoderLayer],
        number: int,
        embedding: Embedding,
        lm_head: Embedding,
    ) -> None:
        name, size, eps = f"model.layers.{number}", config.hidden_size, config.rms_norm_eps
        self._ops = context.ops
        self._embedding = embedding
        self._token_norm = RMSNorm(context, f"{name}.enorm", size, eps)
        self._state_norm = RMSNorm(context, f"{name}.hnorm", size, eps)
        shards = [shard_outputs(context.group, size)]
        self._projection = ColumnParallelLinear(context, [f"{name}.eh_proj"], 2 * size, shards, gather_output=True)
        self._layer = make_layer(number)
        self.attention = self._layer.attention
        self._norm = RMSNorm(context, f"{name}.shared_head.norm", size, eps)
        self.logits, self.argmax = lm_head.logits, lm_head.argmax

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        """As ``DraftHead.combine_hidden_states``: the last hidden states as they are."""
        return states

    @torch.inference_mode()
    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        """As ``DraftHead.forward``."""
        token = self._token_norm(self._embedding(batch.token_ids))
        x = self._ops.clone(self._projection(torch.cat((token, self._state_norm(states)), -1)))  # layers change it
        x, residual = self._layer(x, None, cache, batch)
        hidden, _ = self._norm.add(x, residual)
        return hidden[batch.logits_indices]
