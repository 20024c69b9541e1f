"""Activation functions in plain PyTorch: their definition, a part of ``reference``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activation functions by name, in the order of the kernels' numbers: GELU (Hendrycks and Gimpel, 2016) exactly, by the
error function, or by the hyperbolic tangent."""


def activation(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """A function of ``FUNCTIONS`` of each element of ``[tokens, size]``, computed in float32."""
    result = FUNCTIONS[function](x.float()).to(x.dtype)
    return result if out is None else out.copy_(result)


def activation_and_mul(x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
    """Of ``[tokens, 2 * size]`` a function of the first half times the second half (Shazeer, 2020)."""
    gate, up = x.float().chunk(2, -1)
    result = (FUNCTIONS[function](gate) * up).to(x.dtype)
    return result if out is None else out.copy_(result)
