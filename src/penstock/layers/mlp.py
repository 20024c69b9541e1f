"""Feed-forward layers."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from penstock.parallel import shard_outputs

from .context import BuildContext
from .linear import ColumnParallelLinear


class MLPLayer(Protocol):
    """The interface of feed-forward layers, dense or mixture of experts."""

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``; ``lora_slots`` as for ``ColumnParallelLinear``."""
        ...


class GatedMLP:
    """``down(activation(gate(x)) * up(x))``: SwiGLU or GEGLU (Shazeer, 2020).

    Args:
        name: of the checkpoint's module, above ``gate_proj``, ``up_proj`` and ``down_proj``.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: Literal["silu", "gelu"] = "silu",
    ) -> None:
        self._group = context.group
        self._dtype = context.dtype
        self._shard = shard_outputs(context.group, intermediate_size)
        gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = ColumnParallelLinear(context, gate_up, hidden_size, [self._shard] * 2, bias)
        self._gated = self._gate_up.silu_and_mul if activation == "silu" else self._gate_up.gelu_and_mul
        shards = [shard_outputs(context.group, hidden_size)]
        self._down = ColumnParallelLinear(
            context, [f"{name}.down_proj"], intermediate_size, shards, bias, gather_output=True
        )

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        activations = self._group.all_gather(
            lambda out: self._gated(x, lora_slots, out), x.shape[0], self._shard, self._dtype
        )
        return self._down(activations, lora_slots)


class MLP:
    """``down(gelu(up(x)))`` (Vaswani et al., 2017, with GELU).

    Args:
        names: of the two matrices in the checkpoint.
    """

    def __init__(
        self, context: BuildContext, names: tuple[str, str], hidden_size: int, intermediate_size: int, bias: bool
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._shard = shard_outputs(context.group, intermediate_size)
        up, down = names
        self._up = ColumnParallelLinear(context, [up], hidden_size, [self._shard], bias)
        shards = [shard_outputs(context.group, hidden_size)]
        self._down = ColumnParallelLinear(context, [down], intermediate_size, shards, bias, gather_output=True)

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        activations = self._group.all_gather(
            lambda out: self._ops.gelu(self._up(x, lora_slots), out), x.shape[0], self._shard, self._dtype
        )
        return self._down(activations, lora_slots)
