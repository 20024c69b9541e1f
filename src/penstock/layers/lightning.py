"""Lightning attention (Qin et al., 2024): linear attention with a constant decay."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.state_config import LightningConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import Batch
from penstock.parallel import shard_heads, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear

EPS = 1e-6
"""Epsilon of the norm. As in transformers, ``rms_norm_eps`` is not used."""


class LightningAttention:
    """Linear attention with a constant decay per head, norm over all heads, sigmoid gate, and projection. Queries, keys
    and values are activated. A ``StateLayer``.

    Args:
        name: module in the checkpoint with ``qkv_q``, ``qkv_k`` and ``qkv_v``, ``norm``, ``output_gate`` and
            ``out_proj``.
        layer: index of the layer in the model; the decay depends on it.
        activation: key of ``ops.activations.ACTIVATIONS``.
    """

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, config: LightningConfig, layer: int, activation: str
    ) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self.state_index = -1
        heads = shard_heads(context.group, config.heads, config.heads)[0]
        self._values, self._activation = heads * config.dim, activation
        self._spec = config.spec(str(context.dtype).removeprefix("torch."), heads.size)
        self._decay = _decays(config, layer)[heads.first : heads.end].to(context.device)
        self._projection = ColumnParallelLinear(
            context, [f"{name}.qkv_{part}" for part in "qkv"], hidden_size, [self._values] * 3
        )
        self._norm = context.read_weight(f"{name}.norm.weight", self._values.total)
        self._gate = ColumnParallelLinear(
            context, [f"{name}.output_gate"], hidden_size, [self._values], gather_output=True
        )
        self._output = ColumnParallelLinear(
            context,
            [f"{name}.out_proj"],
            self._values.total,
            [shard_outputs(context.group, hidden_size)],
            gather_output=True,
        )

    def state_spec(self) -> StateSpec:
        """Shape of this rank's state."""
        return self._spec

    def __call__(self, x: Tensor, batch: Batch, logits_only: bool) -> Tensor:
        """See ``StateLayer``."""
        assert batch.states
        states, lora_slots = batch.states.cache[self.state_index], batch.lora_slots
        qkv = self._ops.activation(self._projection(x, lora_slots), self._activation)
        mixed = self._group.all_gather(
            lambda out: self._ops.lightning_attention(qkv, self._decay, states, batch, out),
            x.shape[0],
            self._values,
            self._dtype,
        )
        if logits_only:
            mixed, x = (self._ops.index_select(each, batch.logits_indices) for each in (mixed, x))
            lora_slots = batch.logits_lora_slots
        gate = self._gate(x, lora_slots)
        normed = self._ops.gated_rms_norm(mixed, gate, self._norm, EPS, sigmoid=True)
        return self._output(normed, lora_slots)


def _decays(config: LightningConfig, layer: int) -> Tensor:
    """Decay of each head in a layer, ``[heads]`` float32: slower for later heads and later layers."""
    slopes = torch.tensor(2.0 ** (-8 / config.heads)) ** torch.arange(1, config.heads + 1)
    return torch.exp(-slopes * (1 - layer / (config.num_layers - 1 + 1e-5) + 1e-5))
