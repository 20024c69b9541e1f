"""Random weights, for benchmarks without a checkpoint."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


class DummyWeights:
    """Random weights of any name and shape, equal for equal names and seeds (``load_format="dummy"``)."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._dtype = dtype
        self._seed = seed

    @property
    def version(self) -> str:
        return f"dummy-{self._dtype}-{self._seed}"

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """As ``layers.Weights.read``: vectors of ones, and matrices of normal numbers scaled by their inputs."""
        if len(shape) == 1:
            tensor = torch.ones(shape, dtype=self._dtype)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._seed)
            tensor = torch.empty(shape, dtype=self._dtype).normal_(std=shape[-1] ** -0.5, generator=generator)
        return tensor if rows is None else tensor[rows[0] : rows[1]]

    def has(self, name: str) -> bool:
        return True
