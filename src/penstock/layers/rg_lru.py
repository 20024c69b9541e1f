"""Recurrent block of Griffin (De et al., 2024): a layer with recurrent state in place of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.state_config import RGLRUConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import Batch
from penstock.parallel import shard_heads, shard_outputs

from .context import BuildContext
from .gated_convolution import ShortConvolution
from .linear import ColumnParallelLinear

DECAY = -8.0
"""Logarithm of the decay with an open gate, in units of the softplus of ``recurrent_param``."""


class RGLRU:
    """Short convolution and real-gated linear recurrent unit (RG-LRU); product with the activation of a second
    projection; projection.

    Args:
        name: module in the checkpoint with ``linear_x``, ``linear_y``, ``conv_1d``, ``rg_lru`` and ``linear_out``.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, config: RGLRUConfig) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self.state_index = -1
        heads, _ = shard_heads(context.group, config.heads, config.heads)
        width = config.width
        self._channels = channels = heads * width
        self._activation = config.activation
        self._spec = config.spec(str(context.dtype).removeprefix("torch."), heads.size)
        names = [f"{name}.linear_{part}" for part in "xy"]
        self._input = ColumnParallelLinear(context, names, hidden_size, [channels] * 2, bias=True)
        self._convolution = ShortConvolution(context, f"{name}.conv_1d", channels, config.kernel, bias=True)

        def read(part: str, *shape: int, as_stored: bool = True) -> Tensor:
            return context.read_weight(f"{name}.rg_lru.{part}", *shape, rows=heads.rows, as_stored=as_stored)

        gates = ("input_gate", "recurrent_gate")
        matrices = [read(f"{gate}_weight", heads.total, width, width, as_stored=False) for gate in gates]
        self._gates = context.ops.pack_by_head(torch.cat(matrices, -1).transpose(1, 2).contiguous())
        self._bias = torch.cat([read(f"{gate}_bias", heads.total, width).float() for gate in gates], -1)
        parameter = context.read_weight(
            f"{name}.rg_lru.recurrent_param", channels.total, rows=channels.rows, as_stored=True
        )
        # Computed in float64: PyTorch's float32 functions may differ in the last bit with the position in the tensor.
        rates = DECAY * torch.nn.functional.softplus(parameter.double())
        self._rates = rates.float().unflatten(0, (-1, width))
        shards = [shard_outputs(context.group, hidden_size)]
        self._output = ColumnParallelLinear(
            context, [f"{name}.linear_out"], channels.total, shards, bias=True, gather_output=True
        )

    def state_spec(self) -> StateSpec:
        """Shape of this rank's state."""
        return self._spec

    def __call__(self, x: Tensor, batch: Batch, logits_only: bool) -> Tensor:
        """See ``StateLayer``."""
        assert batch.states
        states, lora_slots, size = batch.states.cache[self.state_index], batch.lora_slots, self._channels.size
        projected = self._input(x, lora_slots)
        weight, bias = self._convolution.weight, self._convolution.bias
        values = self._ops.short_convolution(projected[:, :size], weight, bias, False, states, batch)
        gates = self._ops.linear_by_head(values.unflatten(1, self._rates.shape), self._gates)
        mixed = self._ops.rg_lru(values, gates, self._rates, self._bias, states, batch)
        if logits_only:
            mixed, projected = (self._ops.index_select(each, batch.logits_indices) for each in (mixed, projected))
            lora_slots = batch.logits_lora_slots
        gathered = self._group.all_gather(
            lambda out: self._ops.multiply(mixed, projected[:, size:], self._activation, out),
            mixed.shape[0],
            self._channels,
            self._dtype,
        )
        return self._output(gathered, lora_slots)
