"""What each kernel computes (``reference``), and its backends."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from penstock.core import Code, PenstockError

from . import reference
from .batch import Batch, KVSpec, Queries, Step
from .formats import PLAIN, Format
from .low_rank import LowRank

logger = logging.getLogger(__name__)

__all__ = ["PLAIN", "Batch", "Format", "KVSpec", "LowRank", "Ops", "Queries", "Step", "backend", "reference"]


class Ops(Protocol):
    """A backend. ``reference`` says what each op computes, with shapes and dtypes."""

    NAME: str
    BATCH_INVARIANT: bool
    LAYOUT: str

    def fingerprint(self) -> str: ...
    def set_threads(self, count: int) -> None: ...
    def pack(self, parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = PLAIN) -> Any: ...
    def packed(self, matrix: Any) -> dict[str, Tensor]: ...
    def restore(
        self,
        found: Mapping[str, Tensor],
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        bias: Tensor | None,
        format: Format,
    ) -> Any: ...
    def linear(self, x: Tensor, matrix: Any, wide: bool = False) -> Tensor: ...
    def gated(self, x: Tensor, matrix: Any) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def new_adapters(self, slots: int) -> Any: ...
    def pack_low_rank(self, parts: Sequence[LowRank]) -> Any: ...
    def put_low_rank(self, adapters: Any, slot: int, packed: Any | None) -> None: ...
    def add_low_rank(self, out: Tensor, x: Tensor, adapters: Any, slots: Tensor) -> Tensor: ...
    def likeliest(self, x: Tensor, matrix: Any, allowed: Tensor | None = None) -> Tensor: ...
    def embedding(self, token_ids: Tensor, matrix: Any) -> Tensor: ...
    def take(self, x: Tensor, rows: Tensor) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor: ...
    def new_cache(self, spec: KVSpec, blocks: int, device: torch.device) -> list[Any]: ...
    def store(self, cache: Any, k: Tensor, v: Tensor, slots: Tensor) -> None: ...
    def attention(self, q: Tensor, cache: Any, queries: Queries, scale: float, window: int = 0) -> Tensor: ...
    def copy_blocks(self, source: list[Any], target: list[Any], pairs: list[tuple[int, int]]) -> None: ...
    def recorded(self, step: Step, tokens: int, sequences: int, blocks: int, adapted: bool = False) -> Step: ...


def backend(device: torch.device, name: Literal["auto", "reference", "cpu"] = "auto") -> Ops:
    """The fastest backend for a device, or the one of that name.

    Raises ``PenstockError`` (``unsupported``) where that one cannot run here.
    """
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return reference
    if device.type != "cpu":
        raise PenstockError(Code.UNSUPPORTED, f"the CPU kernels do not run on {device}", "ops")
    try:
        from . import cpu
    except ImportError as error:
        if name == "cpu" or os.environ.get("PENSTOCK_ISA"):
            raise PenstockError(Code.UNSUPPORTED, f"the CPU kernels cannot be used ({error})", "ops") from error
        why = (
            "are not in this installation (it was made without a C++ compiler, or with PENSTOCK_SETS=none)"
            if isinstance(error, ModuleNotFoundError)
            else f"cannot be loaded ({error})"
        )
        logger.warning(
            "The CPU kernels %s, so plain PyTorch computes: slowly, and not batch-invariant. "
            "Install a compiler (apt install g++), then penstock again, with pip's --no-cache-dir.",
            why,
        )
        return reference
    return cpu
