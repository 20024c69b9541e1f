"""Root mean square norm, alone and with the residual stream."""

from __future__ import annotations

from torch import Tensor

from .context import Context


class RMSNorm:
    def __init__(self, context: Context, name: str, size: int, eps: float) -> None:
        self._ops = context.ops
        self._weight = context.take(f"{name}.weight", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The last dimension normed."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` joins the residual stream: that normed, and the stream."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)
