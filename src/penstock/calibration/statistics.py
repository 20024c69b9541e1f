"""Statistics of the inputs of matrices over the calibration samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.ops import Ops

SAMPLED_TOKENS = 1024
"""Number of evenly spaced tokens whose inputs are stored for searches and for the errors in the report."""
PANELS = 4
"""Number of column blocks of a Hessian. A block is computed from its diagonal down; the part above is skipped."""


class InputStatistics:
    """Statistics of an input that is shared by one or more matrices.

    Args:
        tokens: total number of tokens that will be added.
        with_hessian: also sum the outer products of the inputs, which takes as long as computing the layer.
    """

    def __init__(self, ops: Ops, inputs: int, tokens: int, with_hessian: bool) -> None:
        self._ops = ops
        self.seen = 0
        """Number of tokens added so far."""
        self._stride = tokens // SAMPLED_TOKENS | 1  # an odd stride visits different positions of each sample
        self._sampled: list[Tensor] = []
        self._sum = torch.zeros(inputs)
        self.maximum = torch.zeros(inputs)
        """``[in]`` float32: largest magnitude of each input."""
        self.hessian = torch.zeros(inputs, inputs) if with_hessian else None
        """``[in, in]`` float32: sum of outer products of the inputs, which is half the Hessian of the squared error."""

    def add(self, x: Tensor) -> None:
        """Add inputs ``[tokens, in]``. An expert may have no tokens."""
        if not len(x):
            return
        magnitude = x.float().abs()
        torch.maximum(self.maximum, magnitude.amax(0), out=self.maximum)
        self._sum += magnitude.sum(0)
        self._sampled.append(x[-self.seen % self._stride :: self._stride].clone())
        self.seen += len(x)
        if self.hessian is not None:
            self._add_products(x)

    def _add_products(self, x: Tensor) -> None:
        assert self.hessian is not None
        rows = x.T.contiguous()
        step = -(-len(rows) // PANELS)
        for first in range(0, len(rows), step):
            panel = self._ops.pack([rows[first : first + step]])
            self.hessian[first:, first : first + step] += self._ops.linear(rows[first:], panel, out_float32=True)

    def finish(self) -> None:
        """Complete the statistics after all inputs have been added."""
        self.samples = torch.cat(self._sampled) if self._sampled else torch.empty(0, len(self._sum))
        """Inputs of the sampled tokens, ``[sampled, in]`` in the model's dtype."""
        self.mean = self._sum / max(self.seen, 1)
        """``[in]`` float32: mean magnitude of each input."""
        self._sampled.clear()
        if self.hessian is not None:
            self.hessian = self.hessian.tril() + self.hessian.tril(-1).T

    def divide(self, scales: Tensor) -> None:
        """Convert the statistics to those of inputs divided by ``scales`` ``[in]``."""
        self.samples = (self.samples.float() / scales).to(self.samples.dtype)
        self.mean /= scales
        self.maximum /= scales
        if self.hessian is not None:
            self.hessian /= scales[:, None] * scales


@dataclass
class InputObserver:
    """Collects ``InputStatistics``, which describe the first arguments, for the inputs of a layer's matrices."""

    ops: Ops
    tokens: int
    with_hessian: bool
    statistics: dict[tuple[str, ...], InputStatistics] = field(default_factory=dict)
    """Names of the matrices that share an input → statistics of the input, in the order of the computation."""
    _finished: bool = False

    def register(self, names: tuple[str, ...], inputs: int) -> None:
        """Register matrices that share an input of size ``inputs``. Called while the layer is built."""
        self.statistics[names] = InputStatistics(self.ops, inputs, self.tokens, self.with_hessian)

    def observe(self, names: tuple[str, ...], x: Tensor) -> None:
        """Add an input ``[tokens, in]`` of registered matrices."""
        if not self._finished:
            self.statistics[names].add(x)

    def finish(self) -> None:
        """Complete the statistics. Later inputs are ignored."""
        self._finished = True
        for statistics in self.statistics.values():
            statistics.finish()
