"""Heads for multi-token prediction (MTP; DeepSeek-AI, 2024): decoder layers that predict a token beyond the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext, ColumnParallelLinear
from penstock.ops import Batch
from penstock.parallel import shard_outputs

from .layer import DecoderLayer, make_norm
from .model import Model


class DecoderMTPHead:
    """A ``DraftHead`` with a decoder layer.

    Args:
        make_layer: builds a decoder layer from its index.
        number: index of the layer in the checkpoint.
        model: model; the head uses its embedding and language model head.
    """

    recurrent = True

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        make_layer: Callable[[int], DecoderLayer],
        number: int,
        model: Model,
    ) -> None:
        name, size = f"model.layers.{number}", config.hidden_size
        self._ops = context.ops
        self._expert_load = context.expert_load
        self._model = model
        self._token_norm = make_norm(context, config, f"{name}.enorm", size)
        self._state_norm = make_norm(context, config, f"{name}.hnorm", size)
        shards = [shard_outputs(context.group, size)]
        self._projection = ColumnParallelLinear(context, [f"{name}.eh_proj"], 2 * size, shards, gather_output=True)
        self._layer = make_layer(number)
        self.attention = self._layer.attention
        self._norm = make_norm(context, config, f"{name}.shared_head.norm", size)

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return states

    @torch.inference_mode()
    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        if self._expert_load:
            self._expert_load.num_tokens = batch.attention.query_start_loc[-1:]
        token = self._token_norm(self._model.embed(batch.token_ids))
        x = self._ops.clone(self._projection(torch.cat((token, self._state_norm(states)), -1)))  # layers modify ``x``
        x, residual = self._layer(x, None, cache, batch)
        assert residual is not None
        return self._ops.add_residual(x, residual)[batch.logits_indices]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(self._norm(hidden))

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        return self._model.argmax(self._norm(hidden), bitmask)
