"""Random weights, for benchmarks without a checkpoint's weights."""

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
    """``layers.Weights`` with random values that depend on name, seed and device type (``load_format="dummy"``).

    Args:
        folder: folder of the checkpoint, with ``config.json``.
        device: device of the random number generator.
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
        """Vectors are filled with 1; matrices are normally distributed with standard deviation ``inputs ** -0.5``."""
        if len(shape) == 1:
            tensor = torch.ones(shape, dtype=self._dtype, device=self._device)
        else:
            importlib.import_module("torch._prims.rng_prims")  # engine processes lack it (engine/lean_torch.py)
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._seed)
            empty = torch.empty(shape, dtype=self._dtype, device=self._device)
            tensor = empty.normal_(std=shape[-1] ** -0.5, generator=generator)
        return tensor if rows is None else tensor[rows[0] : rows[1]].clone()  # a copy, so that the tensor is freed

    def has(self, name: str) -> bool:
        return True

    def format_of(self, name: str) -> Format:
        return UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight:
        raise AssertionError(name)  # never called: format_of returns UNQUANTIZED
