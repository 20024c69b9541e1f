"""Kimi delta attention (Kimi Team, 2025): a gated delta net with a decay per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.state_config import KimiDeltaConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import Batch, DeltaSizes
from penstock.parallel import Shard, shard_heads, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class KimiDeltaAttention:
    """Short convolution of queries, keys and values; linear attention by the gated delta rule with a decay per channel;
    norm gated by a sigmoid; projection. A ``StateLayer``.

    Args:
        name: module in the checkpoint with ``q_proj``, ``k_proj``, ``v_proj``, ``q_conv1d``, ``k_conv1d``,
            ``v_conv1d``, ``b_proj`` (beta), ``f_a_proj`` and ``f_b_proj`` (decay, low rank), ``g_a_proj`` and
            ``g_b_proj`` (output gate, low rank), ``A_log``, ``dt_bias``, ``o_norm`` and ``o_proj``.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, config: KimiDeltaConfig, eps: float) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self._device = context.device
        self.state_index = -1
        heads, dim = shard_heads(context.group, config.heads, config.heads)[0], config.dim
        self._heads, self._values, self._eps = heads.size, heads * dim, eps
        self._sizes = DeltaSizes(heads.size, heads.size, dim, dim, decay_dim=dim)
        self._spec = config.spec(str(context.dtype).removeprefix("torch."), heads.size)
        self._projection = ColumnParallelLinear(
            context, [f"{name}.{part}_proj" for part in "qkv"], hidden_size, [self._values] * 3
        )
        convolutions = [
            context.read_weight(
                f"{name}.{part}_conv1d.weight", self._values.total, 1, config.kernel, rows=self._values.rows
            )
            for part in "qkv"
        ]
        self._convolution = torch.cat(convolutions)[:, 0].float().T.contiguous()
        every_rank = Shard(0, dim, dim)
        self._beta = context.unquantized_matrix(f"{name}.b_proj", hidden_size, heads)
        self._down = context.unquantized_matrix(f"{name}.f_a_proj", hidden_size, every_rank)
        self._decay = context.unquantized_matrix(f"{name}.f_b_proj", dim, self._values)
        log_decay = context.read_weight(f"{name}.A_log", 1, 1, heads.total, 1, as_stored=True)
        self._log_decay = log_decay.flatten()[heads.first : heads.end].float().clone()
        self._gate_bias = context.read_weight(
            f"{name}.dt_bias", self._values.total, rows=self._values.rows, as_stored=True
        ).float()
        self._gate_down = ColumnParallelLinear(context, [f"{name}.g_a_proj"], hidden_size, [every_rank])
        self._gate = ColumnParallelLinear(context, [f"{name}.g_b_proj"], dim, [self._values])
        self._norm = context.read_weight(f"{name}.o_norm.weight", dim)
        self._output = ColumnParallelLinear(
            context,
            [f"{name}.o_proj"],
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
        qkv = self._projection(x, lora_slots)
        qkv = self._ops.short_convolution(qkv, self._convolution, None, True, states, batch)
        gates = self._gates(x)
        mixed = self._ops.gated_delta_rule(qkv, gates, self._log_decay, self._gate_bias, self._sizes, states, batch)
        if logits_only:
            mixed, x = (self._ops.index_select(each, batch.logits_indices) for each in (mixed, x))
            lora_slots = batch.logits_lora_slots
        gate = self._gate(self._gate_down(x, lora_slots), lora_slots)
        gathered = self._group.all_gather(
            lambda out: self._ops.gated_rms_norm(mixed, gate, self._norm, self._eps, out=out, sigmoid=True),
            mixed.shape[0],
            self._values,
            self._dtype,
        )
        return self._output(gathered, lora_slots)

    def _gates(self, x: Tensor) -> Tensor:
        """Betas, then decays: argument ``gates`` of ``gated_delta_rule``."""
        down, heads = self._down.linear(x), self._heads
        gates = self._ops.empty((x.shape[0], heads + self._values.size), self._dtype, self._device)
        self._beta.linear(x, out=gates[:, :heads])
        self._decay.linear(down, out=gates[:, heads:])
        return gates
