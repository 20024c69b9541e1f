"""Gated short convolution (LFM2): a layer with the last tokens' inputs as state, in place of attention."""

from __future__ import annotations

from torch import Tensor

from penstock.checkpoint.state_config import GatedConvolutionConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import Batch
from penstock.parallel import Shard, shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class ShortConvolution:
    """Weights of ``short_convolution`` for this rank's channels.

    Args:
        name: module in the checkpoint with ``weight``, ``[channels, 1, kernel]``, and ``bias``.
    """

    def __init__(self, context: BuildContext, name: str, channels: Shard, kernel: int, bias: bool) -> None:
        weight = context.read_weight(f"{name}.weight", channels.total, 1, kernel, rows=channels.rows)
        self.weight = weight[:, 0].float().T.contiguous()
        """``[kernel, channels]`` float32."""
        self.bias: Tensor | None = None
        """``[channels]`` float32."""
        if bias:
            self.bias = context.read_weight(f"{name}.bias", channels.total, rows=channels.rows).float()


class GatedConvolution:
    """Three projections B, C and x of the input; convolution of B * x; product with C; projection.

    Args:
        name: module in the checkpoint with ``in_proj_b``, ``_c`` and ``_x``, ``conv`` and ``out_proj``.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, config: GatedConvolutionConfig) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self.state_index = -1
        self._channels = channels = shard_outputs(context.group, config.channels)
        self._spec = config.spec(str(context.dtype).removeprefix("torch."), channels.size)
        names = [f"{name}.in_proj_{part}" for part in "bcx"]
        self._projection = ColumnParallelLinear(context, names, hidden_size, [channels] * 3, config.bias)
        self._convolution = ShortConvolution(context, f"{name}.conv", channels, config.kernel, config.bias)
        shards = [shard_outputs(context.group, hidden_size)]
        self._output = ColumnParallelLinear(
            context, [f"{name}.out_proj"], channels.total, shards, config.bias, gather_output=True
        )

    def state_spec(self) -> StateSpec:
        """Shape of this rank's state."""
        return self._spec

    def __call__(self, x: Tensor, batch: Batch, logits_only: bool) -> Tensor:
        """See ``StateLayer``."""
        assert batch.states
        states, lora_slots, size = batch.states.cache[self.state_index], batch.lora_slots, self._channels.size
        projected = self._projection(x, lora_slots)
        gated = self._ops.multiply(projected[:, 2 * size :], projected[:, :size])
        weight, bias = self._convolution.weight, self._convolution.bias
        mixed = self._ops.short_convolution(gated, weight, bias, False, states, batch)
        if logits_only:
            mixed, projected = (self._ops.index_select(each, batch.logits_indices) for each in (mixed, projected))
            lora_slots = batch.logits_lora_slots
        gathered = self._group.all_gather(
            lambda out: self._ops.multiply(mixed, projected[:, size : 2 * size], out=out),
            mixed.shape[0],
            self._channels,
            self._dtype,
        )
        return self._output(gathered, lora_slots)
