"""Activation functions in plain PyTorch, a part of ``reference``."""

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
"""Activation functions by name, in the order of the kernels' numbers: GELU (Hendrycks and Gimpel, 2016) is exact in
``gelu``, and approximated with tanh in ``gelu_tanh``."""


def swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of gpt-oss (OpenAI, 2025), with clamped inputs and ``up + 1``."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"swigluoai": swigluoai}
"""Gated activations that are not of the form ``activation(gate) * up``. In the kernels, their numbers follow those of
``ACTIVATIONS``."""


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """Apply a function of ``ACTIVATIONS`` to ``[tokens, size]``, computed in float32."""
    result = ACTIVATIONS[function](x.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


def activation_and_mul(gate_up: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """Gated activation (SwiGLU, GEGLU; Shazeer, 2020) of ``[..., 2 * size]``, gate then up: ``function(gate) * up``, or
    ``function(gate, up)`` for one of ``GATES``, computed in float32; ``[..., size]``."""
    gate, up = gate_up.float().chunk(2, -1)
    gated = GATES[function](gate, up) if function in GATES else ACTIVATIONS[function](gate) * up
    result = gated.to(gate_up.dtype)
    return result if out is None else out.copy_(result)
