"""Activation functions in plain PyTorch: their definition, a part of ``reference``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}
"""Activation functions by name, in the order of the kernels' numbers: GELU (Hendrycks and Gimpel, 2016) by the error
function, and in its approximation with the hyperbolic tangent."""


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """A function of ``ACTIVATIONS`` of each element of ``[tokens, size]``, computed in float32."""
    result = ACTIVATIONS[function](x.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


def activation_and_mul(gate_up: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """``[..., 2 * size]``, gate then up, to ``function(gate) * up`` of ``[..., size]``, computed in float32: SwiGLU,
    GEGLU and the like (Shazeer, 2020)."""
    gate, up = gate_up.float().chunk(2, -1)
    result = (ACTIVATIONS[function](gate) * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)
