"""Feed-forward layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .context import BuildContext
from .linear import ColumnParallelLinear


class MLPLayer(Protocol):
    """What a decoder layer needs of its feed-forward part, dense or of experts."""

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``; ``lora_slots`` as of ``ColumnParallelLinear``."""
        ...


class GatedMLP:
    """SwiGLU (Shazeer, 2020): ``down(silu(gate(x)) * up(x))``.

    Args:
        name: of the checkpoint's module, above ``gate_proj``, ``up_proj`` and ``down_proj``.
    """

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, intermediate_size: int, bias: bool = False
    ) -> None:
        self._group = context.group
        gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = ColumnParallelLinear(context, gate_up, hidden_size, [intermediate_size] * 2, bias)
        self._down = ColumnParallelLinear(
            context, [f"{name}.down_proj"], intermediate_size, [hidden_size], bias, gather_output=True
        )

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        return self._down(self._group.all_gather(self._gate_up.silu_and_mul(x, lora_slots)), lora_slots)
