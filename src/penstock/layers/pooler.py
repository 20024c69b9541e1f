"""Layers after pooling: a classifier, or the dense layers of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .context import BuildContext

PoolerLayer = Callable[[Tensor], Tensor]


class PoolerHead:
    """Layers after pooling, computed in float32 by every rank, whatever the model's dtype.

    Args:
        layers: functions from ``[rows, in]`` to ``[rows, out]``, float32.
        outputs: output size of the last layer.
    """

    def __init__(self, layers: Sequence[PoolerLayer], outputs: int) -> None:
        self._layers = layers
        self.outputs = outputs

    @torch.inference_mode()
    def __call__(self, pooled: Tensor) -> Tensor:
        """Apply the layers to pooled states, ``[rows, hidden]`` float32 to ``[rows, outputs]`` float32."""
        for layer in self._layers:
            pooled = layer(pooled)
        return pooled


def dense(
    context: BuildContext, name: str, inputs: int, outputs: int, function: str = "", bias: bool = True
) -> PoolerLayer:
    """A linear layer of the checkpoint, followed by an activation function.

    Args:
        function: a key of ``ops.activations.ACTIVATIONS``; empty: no activation function.
    """

    def read(part: str, *shape: int) -> Tensor:
        return context.read_weight(f"{name}.{part}", *shape, as_stored=True).to(torch.float32)

    weight = read("weight", outputs, inputs)
    matrix = None if context.output else context.ops.pack([weight], read("bias", outputs) if bias else None)

    def layer(x: Tensor) -> Tensor:
        product = context.ops.linear(x, matrix)
        return context.ops.activation(product, function) if function else product

    return layer


def norm(context: BuildContext, name: str, size: int, eps: float, bias: bool) -> PoolerLayer:
    """A layer norm of the checkpoint."""
    weight = context.read_weight(f"{name}.weight", size, as_stored=True).to(torch.float32)
    shift = context.read_weight(f"{name}.bias", size, as_stored=True).to(torch.float32) if bias else None
    return lambda x: context.ops.layer_norm(x, weight, shift, eps)
