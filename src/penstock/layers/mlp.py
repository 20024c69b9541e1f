"""Feed-forward layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.parallel import shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class MLPLayer(Protocol):
    """Interface of feed-forward layers, dense or mixture of experts."""

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """Map ``[tokens, hidden]`` to ``[tokens, hidden]``. ``lora_slots``: see ``ColumnParallelLinear``."""
        ...


class GatedMLP:
    """Gated MLP, ``down(activation(gate(x)) * up(x))``: SwiGLU, GEGLU (Shazeer, 2020) etc.

    Args:
        name: module in the checkpoint with ``projections``.
        bias: ``gate_proj`` and ``up_proj`` have a bias.
        down_bias: ``down_proj`` has a bias; None: same as ``bias``.
        activation: a key of ``ops.activations.ACTIVATIONS`` or ``GATES``.
        projections: names of gate, up and down projection.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: str = "silu",
        down_bias: bool | None = None,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self._group = context.group
        self._dtype = context.dtype
        self._shard = shard_outputs(context.group, intermediate_size)
        *gate_up, down = (f"{name}.{each}" for each in projections)
        self._gate_up = ColumnParallelLinear(context, gate_up, hidden_size, [self._shard] * 2, bias)
        self._activation = activation
        shards = [shard_outputs(context.group, hidden_size)]
        self._down = ColumnParallelLinear(
            context,
            [down],
            intermediate_size,
            shards,
            bias if down_bias is None else down_bias,
            gather_output=True,
        )

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        activations = self._group.all_gather(
            lambda out: self._gate_up.activation_and_mul(x, self._activation, lora_slots, out),
            x.shape[0],
            self._shard,
            self._dtype,
        )
        return self._down(activations, lora_slots)


class MLP:
    """MLP without a gate, ``down(activation(up(x)))`` (Vaswani et al., 2017).

    Args:
        names: names of the up and down projection in the checkpoint.
        activation: a key of ``ops.activations.ACTIVATIONS``.
    """

    def __init__(
        self,
        context: BuildContext,
        names: tuple[str, str],
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: str,
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._shard = shard_outputs(context.group, intermediate_size)
        self._activation = activation
        up, down = names
        self._up = ColumnParallelLinear(context, [up], hidden_size, [self._shard], bias)
        shards = [shard_outputs(context.group, hidden_size)]
        self._down = ColumnParallelLinear(context, [down], intermediate_size, shards, bias, gather_output=True)

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        activations = self._group.all_gather(
            lambda out: self._ops.activation(self._up(x, lora_slots), self._activation, out),
            x.shape[0],
            self._shard,
            self._dtype,
        )
        return self._down(activations, lora_slots)


class ScaledGatedMLP:
    """Gated MLP with scales, ``down(silu(gate(x) * gate_scale) * up(x)) * output_scale`` (Falcon-H1).

    Args:
        name, hidden_size, intermediate_size, bias: see ``GatedMLP``.
        scales: ``gate_scale`` and ``output_scale``.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        scales: tuple[float, float],
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._gate_scale, self._output_scale = scales
        self._shard = shard_outputs(context.group, intermediate_size)
        self._gate, self._up = (
            ColumnParallelLinear(context, [f"{name}.{part}_proj"], hidden_size, [self._shard], bias)
            for part in ("gate", "up")
        )
        shards = [shard_outputs(context.group, hidden_size)]
        self._down = ColumnParallelLinear(
            context, [f"{name}.down_proj"], intermediate_size, shards, bias, gather_output=True
        )

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        gate, up = self._ops.scale(self._gate(x, lora_slots), self._gate_scale), self._up(x, lora_slots)
        activations = self._group.all_gather(
            lambda out: self._ops.multiply(up, gate, "silu", out), x.shape[0], self._shard, self._dtype
        )
        return self._ops.scale(self._down(activations, lora_slots), self._output_scale)
