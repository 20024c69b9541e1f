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


def swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU as gpt-oss has it (OpenAI, 2025): the gate is at most 7, up between -7 and 7 and then one more."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"swigluoai": swigluoai}
"""Functions of a gate and what it gates that are no product of an activation and the latter. In the kernels their
numbers follow those of ``ACTIVATIONS``."""


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """A function of ``ACTIVATIONS`` of each element of ``[tokens, size]``, computed in float32."""
    result = ACTIVATIONS[function](x.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


def activation_and_mul(gate_up: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """``[..., 2 * size]``, gate then up, to ``function(gate) * up`` of ``[..., size]``, computed in float32: SwiGLU,
    GEGLU and the like (Shazeer, 2020). Of a function of ``GATES`` to ``function(gate, up)``."""
    gate, up = gate_up.float().chunk(2, -1)
    gated = GATES[function](gate, up) if function in GATES else ACTIVATIONS[function](gate) * up
    result = gated.to(gate_up.dtype)
    return result if out is None else out.copy_(result)
