"""Mamba (Gu and Dao, 2023): a layer with recurrent state in place of attention."""

from __future__ import annotations

from torch import Tensor

from penstock.checkpoint.state_config import MambaConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.ops import Batch, ScanWeights
from penstock.parallel import Shard, shard_outputs

from .context import BuildContext
from .gated_convolution import ShortConvolution
from .linear import ColumnParallelLinear
from .norm import Norm, RMSNorm, UnweightedRMSNorm


class Mamba:
    """Short convolution; projections of its result to the steps (dt), B and C of a selective scan; projection.

    Args:
        name: module in the checkpoint with ``in_proj_x`` and ``_z``, ``conv1d``, ``x_proj_step`` and ``_states``,
            ``dt_proj``, ``A_log``, ``D`` and ``out_proj``, and with weighted norms ``dt_layernorm``, ``b_layernorm``
            and ``c_layernorm``.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, config: MambaConfig) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self.state_index = -1
        self._channels = channels = shard_outputs(context.group, config.channels)
        self._size = size = config.state_size
        self._spec = config.spec(str(context.dtype).removeprefix("torch."), channels.size)
        self._input = ColumnParallelLinear(
            context, [f"{name}.in_proj_{part}" for part in "xz"], hidden_size, [channels] * 2, config.bias
        )
        self._convolution = ShortConvolution(
            context, f"{name}.conv1d", channels, config.kernel, config.convolution_bias
        )

        def projection(part: str, outputs: int) -> ColumnParallelLinear:
            shards = [shard_outputs(context.group, outputs)]
            return ColumnParallelLinear(context, [f"{name}.{part}"], channels.total, shards, gather_output=True)

        self._step_inputs = projection("x_proj_step", config.step_rank)
        self._states = projection("x_proj_states", 2 * size)
        self._norms: list[Norm] = []
        if config.norms != "none":
            sizes = {"dt": config.step_rank, "b": size, "c": size}
            self._norms = [
                RMSNorm(context, f"{name}.{part}_layernorm", each, config.norm_eps)
                if config.norms == "weighted"
                else UnweightedRMSNorm(context, each, config.norm_eps)
                for part, each in sizes.items()
            ]
        # Unquantized: an error of a step multiplies the exponent of the decay of all later tokens.
        self._steps = context.unquantized_matrix(f"{name}.dt_proj", config.step_rank, channels)
        self._weights = _read_scan_weights(context, name, channels, size)
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
        states, lora_slots, channels = batch.states.cache[self.state_index], batch.lora_slots, self._channels
        projected = self._input(x, lora_slots)
        values, gate = projected[:, : channels.size], projected[:, channels.size :]
        weight, bias = self._convolution.weight, self._convolution.bias
        mixed = self._group.all_gather(
            lambda out: self._ops.short_convolution(values, weight, bias, True, states, batch, out),
            x.shape[0],
            channels,
            self._dtype,
        )
        step_inputs, b_and_c = self._step_inputs(mixed, lora_slots), self._states(mixed, lora_slots)
        b, c = b_and_c[:, : self._size], b_and_c[:, self._size :]
        if self._norms:
            step_inputs, b, c = (norm(each) for norm, each in zip(self._norms, (step_inputs, b, c), strict=True))
        steps, own = self._steps.linear(step_inputs), mixed[:, channels.first : channels.end]
        gathered = self._group.all_gather(
            lambda out: self._ops.selective_scan(own, steps, b, c, gate, self._weights, states, batch, out),
            x.shape[0],
            channels,
            self._dtype,
        )
        if logits_only:
            gathered, lora_slots = self._ops.index_select(gathered, batch.logits_indices), batch.logits_lora_slots
        return self._output(gathered, lora_slots)


def _read_scan_weights(context: BuildContext, name: str, channels: Shard, size: int) -> ScanWeights:
    """Read the scan's weights of this rank's channels."""

    def read(part: str, *shape: int) -> Tensor:
        return context.read_weight(f"{name}.{part}", *shape, rows=channels.rows, as_stored=True).float()

    # Computed in float64: PyTorch's float32 exp may differ in the last bit with the position in the tensor.
    rates = -read("A_log", channels.total, size).double().exp()
    return ScanWeights(rates.float().T.contiguous(), read("dt_proj.bias", channels.total), read("D", channels.total))
