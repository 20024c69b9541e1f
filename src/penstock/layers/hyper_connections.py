"""Residual streams with hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.compressed_config import HyperConnections

from .context import BuildContext


class StreamWeights:
    """Weights to collapse the residual streams for a layer, to expand its output, and to mix the streams, all in
    float32 (manifold-constrained hyper-connections; Xie et al., 2026).

    Args:
        names: names of the matrix, ``[width, streams * hidden]``, the base and the scale in the checkpoint.
        collapse_only: the weights only collapse the streams.
    """

    def __init__(
        self,
        context: BuildContext,
        names: tuple[str, str, str],
        hidden_size: int,
        config: HyperConnections,
        eps: float,
        collapse_only: bool = False,
    ) -> None:
        self._ops, self._config, self._eps = context.ops, config, eps
        width = config.streams * (1 if collapse_only else 2 + config.streams)
        inputs = config.streams * hidden_size

        def read(name: str, *shape: int) -> Tensor:
            return context.read_weight(name, *shape, as_stored=True).float()

        matrix, self._base, self._scale = (
            read(name, *shape)
            for name, shape in zip(names, ((width, inputs), (width,), (1 if collapse_only else 3,)), strict=True)
        )
        self._matrix = context.ops.pack([matrix])
        self._ones = context.shared_table(
            f"ones {inputs}", lambda: torch.ones(inputs, dtype=torch.float32, device=context.device)
        )
        self._to_float32 = context.dtype != torch.float32

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Collapse streams ``[tokens, streams * hidden]`` to ``[tokens, hidden]``. Also returns the weights (see
        ``reference.hyper_weights``)."""
        config = self._config
        wide = self._ops.to_float32(streams) if self._to_float32 else streams
        logits = self._ops.linear(self._ops.rms_norm(wide, self._ones, self._eps), self._matrix, True)
        weights = self._ops.hyper_weights(
            logits, self._base, self._scale, config.streams, config.iterations, config.eps
        )
        return self._ops.collapse_streams(streams, weights, config.streams), weights
