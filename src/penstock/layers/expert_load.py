"""Counters of tokens per expert and layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ExpertLoad:
    """Counters of a model's layers, incremented by the kernels."""

    counts: dict[int, Tensor] = field(default_factory=dict)
    """Number of tokens routed to each expert, ``[experts]`` int64, by layer."""
    num_tokens: Tensor | None = None
    """``[1]`` int32 on the device: number of tokens in the current batch. Padding after these tokens (on GPUs) is not
    counted."""

    def of_layer(self, layer: int, num_experts: int, device: torch.device) -> Tensor:
        """The counters of a layer. A model that replaces this one after a weight update reuses them."""
        if layer not in self.counts:
            self.counts[layer] = torch.zeros(num_experts, dtype=torch.int64, device=device)
        return self.counts[layer]

    def read(self) -> dict[int, list[int]]:
        """Counts by layer."""
        return {layer: counts.tolist() for layer, counts in self.counts.items()}

    def write(self, counts: dict[int, list[int]]) -> None:
        """Set the counters to a result of ``read``. Layers without an entry get 0."""
        for layer, tensor in self.counts.items():
            tensor.copy_(torch.tensor(counts.get(layer, [0] * len(tensor))))
