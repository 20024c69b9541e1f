"""Activation functions in plain PyTorch, for ``reference``."""

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
    "relu2": lambda x: F.relu(x).square(),
}
"""Activation functions by name, in the order of their numbers in the kernels. ``gelu`` is the exact GELU (Hendrycks and
Gimpel, 2016), ``gelu_tanh`` its approximation with tanh, ``relu2`` the squared ReLU (So et al., 2021)."""


def swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of gpt-oss (OpenAI, 2025), with clamped inputs and ``up + 1``."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def swiglu10(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU with clamped inputs (DeepSeek-V4)."""
    return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


GATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"swigluoai": swigluoai, "swiglu10": swiglu10}
"""Gated activations by name that are not of the form ``activation(gate) * up``. Their numbers in the kernels follow the
numbers of ``ACTIVATIONS``."""


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """Apply a function of ``ACTIVATIONS`` to ``[tokens, size]``, in float32. The result has the dtype of ``x``."""
    result = ACTIVATIONS[function](x.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


def activation_and_mul(gate_up: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """Gated activation (SwiGLU, GEGLU; Shazeer, 2020) of ``[..., 2 * size]`` (gate, then up). Returns
    ``function(gate) * up``, or ``function(gate, up)`` for a function of ``GATES``, ``[..., size]``, computed in
    float32."""
    gate, up = gate_up.float().chunk(2, -1)
    gated = GATES[function](gate, up) if function in GATES else ACTIVATIONS[function](gate) * up
    result = gated.to(gate_up.dtype)
    return result if out is None else out.copy_(result)
