"""Statistics of the inputs of a matrix over the calibration samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.ops import Ops

SAMPLED_TOKENS = 1024
"""Tokens, evenly spread, whose inputs are kept for searches and for the error in the report."""
PANELS = 4
"""Blocks of rows in which a Hessian is summed: the half above the diagonal is not computed."""


class InputStatistics:
    """What was fed to matrices that share their input.

    Args:
        tokens: that there will be in all.
        with_hessian: whether to sum the outer products of the inputs, which costs as much as the layer itself.
    """

    def __init__(self, ops: Ops, inputs: int, tokens: int, with_hessian: bool) -> None:
        self._ops = ops
        self.seen = 0
        """Tokens so far."""
        self._stride = tokens // SAMPLED_TOKENS | 1  # odd, so that all positions of a sample come by turns
        self._sampled: list[Tensor] = []
        self._sum = torch.zeros(inputs)
        self.maximum = torch.zeros(inputs)
        """``[in]`` float32: largest magnitude of each input."""
        self.hessian = torch.zeros(inputs, inputs) if with_hessian else None
        """``[in, in]`` float32: sum of the inputs' outer products, half the Hessian of the squared error."""

    def add(self, x: Tensor) -> None:
        """Add inputs ``[tokens, in]``, none of an expert that no token has chosen."""
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
        """Call once all inputs have been added."""
        self.samples = torch.cat(self._sampled) if self._sampled else torch.empty(0, len(self._sum))
        """``[sampled, in]``, in the model's dtype."""
        self.mean = self._sum / max(self.seen, 1)
        """``[in]`` float32: mean magnitude of each input."""
        self._sampled.clear()
        if self.hessian is not None:
            self.hessian = self.hessian.tril() + self.hessian.tril(-1).T

    def divide(self, scales: Tensor) -> None:
        """Account for inputs that are divided by ``[in]`` from now on."""
        self.samples = (self.samples.float() / scales).to(self.samples.dtype)
        self.mean /= scales
        self.maximum /= scales
        if self.hessian is not None:
            self.hessian /= scales[:, None] * scales


@dataclass
class InputObserver:
    """Makes statistics of what the matrices of a layer are fed with."""

    ops: Ops
    tokens: int
    """Number of tokens that there will be in all."""
    with_hessian: bool
    """As of ``InputStatistics``."""
    statistics: dict[tuple[str, ...], InputStatistics] = field(default_factory=dict)
    """By the names of the matrices that share an input, in the order of the computation."""
    _finished: bool = False

    def register(self, names: tuple[str, ...], inputs: int) -> None:
        """Add matrices that share an input, while the layer is built."""
        self.statistics[names] = InputStatistics(self.ops, inputs, self.tokens, self.with_hessian)

    def observe(self, names: tuple[str, ...], x: Tensor) -> None:
        """Add an input ``[tokens, in]`` of theirs, before they are multiplied with it."""
        if not self._finished:
            self.statistics[names].add(x)

    def finish(self) -> None:
        """Call once all samples have been computed; what comes then is not looked at."""
        self._finished = True
        for statistics in self.statistics.values():
            statistics.finish()
