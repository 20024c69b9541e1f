"""Random weights, for benchmarks without a checkpoint."""

from __future__ import annotations

import hashlib
import importlib
import zlib
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight


class DummyWeights:
    """Random weights of any name and shape, equal for equal names, seeds and kinds of device
    (``load_format="dummy"``).

    Args:
        folder: of the checkpoint, whose ``config.json`` gives the shapes.
        device: where they are drawn.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self._config = folder / "config.json"
        self._dtype = dtype
        self._seed = seed
        self._device = torch.device(device)

    @property
    def version(self) -> str:
        on = "" if self._device.type == "cpu" else f"{self._device.type} "
        drawn = f"dummy {on}{self._dtype} {self._seed} ".encode()
        return hashlib.sha256(drawn + self._config.read_bytes()).hexdigest()

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """See ``layers.Weights.read``: vectors of ones, and matrices of normal numbers scaled by their inputs."""
        if len(shape) == 1:
            tensor = torch.ones(shape, dtype=self._dtype, device=self._device)
        else:
            importlib.import_module("torch._prims.rng_prims")  # which engine processes lack (engine/lean_torch.py)
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._seed)
            empty = torch.empty(shape, dtype=self._dtype, device=self._device)
            tensor = empty.normal_(std=shape[-1] ** -0.5, generator=generator)
        return tensor if rows is None else tensor[rows[0] : rows[1]].clone()  # which does not keep the whole tensor

    def has(self, name: str) -> bool:
        return True

    def format_of(self, name: str) -> Format:
        """See ``layers.Weights.format_of``: nothing is quantized."""
        return UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight:
        raise NotImplementedError
