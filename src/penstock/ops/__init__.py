"""What each kernel computes (``reference``), and its backends."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from . import reference
from .batch import Batch, KVSpec

__all__ = ["Batch", "KVSpec", "Ops", "backend", "reference"]


class Ops(Protocol):
    """A backend. ``reference`` says what each op computes, with shapes and dtypes."""

    NAME: str
    BATCH_INVARIANT: bool

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def new_cache(self, spec: KVSpec, blocks: int, device: torch.device) -> list[Any]: ...
    def store(self, cache: Any, k: Tensor, v: Tensor, slots: Tensor) -> None: ...
    def attention(self, q: Tensor, cache: Any, batch: Batch, scale: float, window: int = 0) -> Tensor: ...
    def copy_blocks(self, source: list[Any], target: list[Any], pairs: list[tuple[int, int]]) -> None: ...


def backend() -> Ops:
    """The fastest backend that this machine can run."""
    return reference
