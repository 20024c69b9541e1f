"""How many tokens each expert of each layer gets, counted while a model computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ExpertLoad:
    """Counters of a model's layers, which the kernels raise."""

    counts: dict[int, Tensor] = field(default_factory=dict)
    """By layer ``[experts]`` int64: tokens that chose each expert."""
    num_tokens: Tensor | None = None
    """``[1]`` int32 on the device: tokens of the batch that is being computed. On GPUs its padding comes behind them,
    and does not count."""

    def of_layer(self, layer: int, num_experts: int, device: torch.device) -> Tensor:
        """The counters of a layer, also for a model that takes the place of another one."""
        if layer not in self.counts:
            self.counts[layer] = torch.zeros(num_experts, dtype=torch.int64, device=device)
        return self.counts[layer]

    def read(self) -> dict[int, list[int]]:
        """The counts by layer."""
        return {layer: counts.tolist() for layer, counts in self.counts.items()}

    def write(self, counts: dict[int, list[int]]) -> None:
        """Set the counters to what ``read`` has returned; those of other layers to 0."""
        for layer, tensor in self.counts.items():
            tensor.copy_(torch.tensor(counts.get(layer, [0] * len(tensor))))
