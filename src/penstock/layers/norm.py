"""Root mean square norm, alone and fused with the residual stream."""

from __future__ import annotations

from torch import Tensor

from .context import BuildContext


class RMSNorm:
    """RMS norm (Zhang and Sennrich, 2019) over the last dimension."""

    def __init__(self, context: BuildContext, name: str, size: int, eps: float) -> None:
        self._ops = context.ops
        self._weight = context.read_weight(f"{name}.weight", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., size]`` normed."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream; returns the sum normed, and the sum, both ``[tokens, size]``."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)
