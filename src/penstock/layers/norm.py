"""Norms, also fused with the addition to the residual stream."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .context import BuildContext


class Norm(Protocol):
    """Interface of norms over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize ``[..., size]``."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream. Returns the normalized sum and the sum, both ``[tokens, size]``."""
        ...


class RMSNorm:
    """RMS norm (Zhang and Sennrich, 2019); a ``Norm``.

    Args:
        float32: multiply by the weight in float32, and round the product.
        unit_offset: multiply by 1 + weight, in float32.
        as_stored: do not round the weight to the model's dtype; requires ``float32``.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        size: int,
        eps: float,
        float32: bool = False,
        unit_offset: bool = False,
        as_stored: bool = False,
    ) -> None:
        self._ops = context.ops
        weight = context.read_weight(f"{name}.weight", size, as_stored=as_stored)
        self.weight = 1 + weight.float() if unit_offset else weight.float() if float32 else weight
        """Argument ``weight`` of ``Ops.rms_norm``, ``[size]``."""
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)


class UnweightedRMSNorm(RMSNorm):
    """RMS norm without weight (Llama 4's L2 norm)."""

    def __init__(self, context: BuildContext, size: int, eps: float) -> None:
        self._ops = context.ops
        self.weight = torch.ones(size, dtype=context.dtype, device=context.device)
        self._eps = eps


class LayerNorm:
    """Layer norm (Ba et al., 2016); a ``Norm``.

    Args:
        heads: for a norm with one weight per head: first and end of this rank's heads, and the number of all heads.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        size: int,
        eps: float,
        bias: bool = False,
        heads: tuple[int, int, int] | None = None,
    ) -> None:
        self._ops = context.ops
        if heads:
            weight = context.read_weight(f"{name}.weight", heads[2], size, rows=heads[:2]).contiguous()
        else:
            weight = context.read_weight(f"{name}.weight", size)
        self._weight = weight.float()
        self._bias = context.read_weight(f"{name}.bias", size).float() if bias else None
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = self._ops.add_residual(x, residual)
        return self(residual), residual
