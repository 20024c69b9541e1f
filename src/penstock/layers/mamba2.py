"""Mamba 2 (Dao and Gu, 2024): a layer with recurrent state in place of attention, or beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.state_config import Mamba2Config
from penstock.checkpoint.state_spec import StateSpec
from penstock.core.quantization import UNQUANTIZED
from penstock.ops import Batch, StateSpaceSizes
from penstock.parallel import shard_heads, shard_outputs
from penstock.parallel.group import ComputeFn

from .context import BuildContext
from .linear import ColumnParallelLinear


class Mamba2Mixer:
    """Short convolution of x, B and C; state space model; gated norm; projection.

    Ranks split the heads. A group of the norm may have heads of several ranks; then each rank normalizes all heads.

    Args:
        name: module in the checkpoint with ``in_proj_z``, ``_x``, ``_b``, ``_c`` and ``_dt``, ``conv1d_x``, ``_b`` and
            ``_c``, ``A_log``, ``dt_bias``, ``D``, ``norm`` and ``out_proj``.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, config: Mamba2Config, eps: float) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self.state_index = -1
        heads, groups = shard_heads(context.group, config.heads, config.groups)
        limits = config.min_step, config.max_step
        self._sizes = StateSpaceSizes(heads.size, groups.size, config.head_dim, config.state_size, *limits)
        self._spec = config.spec(str(context.dtype).removeprefix("torch."), heads.size, groups.size)
        self._eps, self._gate_first = eps, config.gate_first
        self._input_scale, self._output_scale = config.input_scale, config.output_scale
        self._gate_scale, *convolved_scales, self._step_scale = config.scales
        self._values, keys = heads * config.head_dim, groups * config.state_size
        self._gathers_values = config.norm and context.group.size > config.groups
        parts = [self._values, keys, keys]
        bias = config.input_bias
        self._projection = ColumnParallelLinear(
            context, [f"{name}.in_proj_{part}" for part in "xbc"], hidden_size, parts, bias
        )
        self._gate = ColumnParallelLinear(
            context, [f"{name}.in_proj_z"], hidden_size, [self._values], bias, gather_output=self._gathers_values
        )
        self._steps = ColumnParallelLinear(
            context, [f"{name}.in_proj_dt"], hidden_size, [heads], bias, format=UNQUANTIZED
        )
        kernels = [
            scale
            * context.read_weight(
                f"{name}.conv1d_{part}.weight", shard.total, 1, config.kernel, rows=shard.rows
            ).float()
            for part, shard, scale in zip("xbc", parts, convolved_scales, strict=True)
        ]
        self._convolution = torch.cat(kernels)[:, 0].T.contiguous()
        self._convolution_bias = None
        if config.convolution_bias:
            biases = [
                context.read_weight(f"{name}.conv1d_{part}.bias", shard.total, rows=shard.rows)
                for part, shard in zip("xbc", parts, strict=True)
            ]
            self._convolution_bias = torch.cat(biases).float()
        self._log_decay, self._step_bias, self._skip = (
            context.read_weight(f"{name}.{part}", heads.total, rows=heads.rows, as_stored=True).float()
            for part in ("A_log", "dt_bias", "D")
        )
        self._norm = None
        if config.norm:
            normed, size = self._values, self._values.total // config.groups
            rows = None if self._gathers_values else normed.rows
            self._norm = context.read_weight(f"{name}.norm.weight", normed.total, rows=rows).view(-1, size)
        self._output = ColumnParallelLinear(
            context,
            [f"{name}.out_proj"],
            self._values.total,
            [shard_outputs(context.group, hidden_size)],
            config.output_bias,
            gather_output=True,
        )

    def state_spec(self) -> StateSpec:
        """Shape of this rank's state."""
        return self._spec

    def __call__(self, x: Tensor, batch: Batch, logits_only: bool) -> Tensor:
        """See ``StateLayer``."""
        assert batch.states
        states, lora_slots = batch.states.cache[self.state_index], batch.lora_slots
        x = self._scaled(x, self._input_scale)
        projected = self._projection(x, lora_slots)
        steps = self._scaled(self._steps(x, lora_slots), self._step_scale)
        xbc = self._ops.short_convolution(projected, self._convolution, self._convolution_bias, True, states, batch)

        def scan(out: Tensor | None = None) -> Tensor:
            parameters = self._log_decay, self._step_bias, self._skip, self._sizes
            return self._ops.state_space(xbc, steps, *parameters, states, batch, out)

        values = self._gathered(scan, x.shape[0]) if self._gathers_values else scan()
        if logits_only:
            values, x = (self._ops.index_select(each, batch.logits_indices) for each in (values, x))
            lora_slots = batch.logits_lora_slots
        gate = self._scaled(self._gate(x, lora_slots), self._gate_scale)

        def gated(out: Tensor | None = None) -> Tensor:
            if self._norm is None:
                return self._ops.multiply(values, gate, "silu", out)
            return self._ops.gated_rms_norm(values, gate, self._norm, self._eps, self._gate_first, out)

        mixed = gated() if self._gathers_values else self._gathered(gated, x.shape[0])
        return self._scaled(self._output(mixed, lora_slots), self._output_scale)

    def _gathered(self, compute: ComputeFn, rows: int) -> Tensor:
        """The result of ``compute`` for the heads of all ranks, ``[rows, heads * head_dim]``."""
        return self._group.all_gather(compute, rows, self._values, self._dtype)

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1 else self._ops.scale(x, factor)
