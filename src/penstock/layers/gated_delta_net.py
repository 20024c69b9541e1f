"""Gated delta net (Yang et al., 2024): a layer with recurrent state in place of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.state_config import GatedDeltaNetConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.core.quantization import UNQUANTIZED
from penstock.ops import Batch, DeltaSizes
from penstock.parallel import shard_heads, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class GatedDeltaNet:
    """Short convolution of queries, keys and values; linear attention by the gated delta rule; gated norm; projection.

    Args:
        name: module in the checkpoint with ``in_proj_q``, ``_k``, ``_v``, ``_z``, ``_b`` and ``_a``, ``conv1d_q``,
            ``_k`` and ``_v``, ``A_log``, ``dt_bias``, ``norm`` and ``out_proj``.
    """

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, config: GatedDeltaNetConfig, eps: float
    ) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self.state_index = -1
        values, keys = shard_heads(context.group, config.value_heads, config.key_heads)
        self._sizes = DeltaSizes(keys.size, values.size, config.key_dim, config.value_dim, beta_scale=config.beta_scale)
        self._spec = config.spec(str(context.dtype).removeprefix("torch."), keys.size, values.size)
        self._eps = eps if config.norm_eps is None else config.norm_eps
        self._values = values * config.value_dim
        parts = [keys * config.key_dim, keys * config.key_dim, self._values]
        self._channels = sum(part.size for part in parts)
        self._projection = ColumnParallelLinear(
            context, [f"{name}.in_proj_{part}" for part in "qkvz"], hidden_size, [*parts, self._values]
        )
        self._gates = ColumnParallelLinear(
            context, [f"{name}.in_proj_b", f"{name}.in_proj_a"], hidden_size, [values, values], format=UNQUANTIZED
        )
        convolutions = [
            context.read_weight(f"{name}.conv1d_{part}.weight", shard.total, 1, config.kernel, rows=shard.rows)
            for part, shard in zip("qkv", parts, strict=True)
        ]
        self._convolution = torch.cat(convolutions)[:, 0].float().T.contiguous()
        self._log_decay, self._gate_bias = (
            context.read_weight(f"{name}.{part}", values.total, rows=values.rows, as_stored=True).float()
            for part in ("A_log", "dt_bias")
        )
        self._norm = context.read_weight(f"{name}.norm.weight", config.value_dim)
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
        projected, gates = self._projection(x, lora_slots), self._gates(x, lora_slots)
        qkv, z = projected[:, : self._channels], projected[:, self._channels :]
        qkv = self._ops.short_convolution(qkv, self._convolution, None, True, states, batch)
        mixed = self._ops.gated_delta_rule(qkv, gates, self._log_decay, self._gate_bias, self._sizes, states, batch)
        if logits_only:
            mixed, z = (self._ops.index_select(each, batch.logits_indices) for each in (mixed, z))
            lora_slots = batch.logits_lora_slots
        gathered = self._group.all_gather(
            lambda out: self._ops.gated_rms_norm(mixed, z, self._norm, self._eps, out=out),
            mixed.shape[0],
            self._values,
            self._dtype,
        )
        return self._output(gathered, lora_slots)
