"""Launches of Triton kernels: on the GPU, in Triton's interpreter on a CPU, or recorded for compilation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if kernels run in Triton's interpreter on CPU tensors, for tests (``TRITON_INTERPRET=1`` when this module is
imported). The interpreter multiplies bfloat16 incorrectly, so that tests use float32 and float16."""
DEFAULT_SM_COUNT = 132
"""Number of multiprocessors for recorded launches (H100)."""
INTERPRETED_SM_COUNT = 2
"""Number of multiprocessors for interpreted launches. Their programs run sequentially."""

MIN_FP8 = (8, 9)
"""Minimum compute capability for fp8 products and conversions."""


@dataclass(frozen=True)
class Architecture:
    """Properties of a GPU on which the choice of kernels depends."""

    capability: tuple[int, int]
    """Compute capability."""
    shared_memory: int
    """Maximum shared memory of a program in bytes."""


ARCHITECTURES = {
    80: Architecture((8, 0), 166912),
    90: Architecture((9, 0), 232448),
    100: Architecture((10, 0), 232448),
}
"""Data center GPUs (A100, H100, B200) for which kernels can be compiled without a GPU."""
DEFAULT_ARCHITECTURE = ARCHITECTURES[90]


@dataclass(frozen=True)
class Launch:
    """A recorded launch of a kernel."""

    kernel: Any
    args: tuple[Any, ...]
    """Positional arguments: tensors, numbers and None."""
    constants: dict[str, Any]
    """Arguments of type ``tl.constexpr``."""
    num_warps: int
    num_stages: int


_recorded: list[Launch] | None = None
"""Launches recorded so far; None while launches are not recorded."""
_recorded_for: Architecture | None = None
"""GPU for which launches are recorded; None while they are not recorded."""


@contextmanager
def record_launches(target: Architecture = DEFAULT_ARCHITECTURE) -> Iterator[list[Launch]]:
    """Record launches for the GPU ``target`` instead of running them. The results of ops are uninitialized."""
    global _recorded, _recorded_for
    launches: list[Launch] = []
    _recorded, _recorded_for = launches, target
    try:
        yield launches
    finally:
        _recorded = _recorded_for = None


def launch(
    kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
) -> None:
    """Launch a kernel, unless the grid is empty.

    Multiplications and additions are never fused except by ``tl.fma``, so that all variants of a kernel give the same
    bits.
    """
    if 0 in grid:
        return
    if _recorded is not None:
        _recorded.append(Launch(kernel, args, constants, num_warps, num_stages))
        return
    kernel[tuple(grid)](*args, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)


def sm_count(device: torch.device) -> int:
    """Number of multiprocessors of a GPU, for the grids of persistent kernels. Results do not depend on this number."""
    if device.type != "cuda":
        return INTERPRETED_SM_COUNT if _recorded is None else DEFAULT_SM_COUNT
    return _sm_count(device)


@cache
def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def architecture(device: torch.device) -> Architecture:
    """Architecture of a GPU; while launches are recorded, the recorded architecture. Without a GPU: an H100."""
    return _recorded_for or _architecture(device)


@cache
def _architecture(device: torch.device) -> Architecture:
    if device.type != "cuda":
        return DEFAULT_ARCHITECTURE
    major, minor = torch.cuda.get_device_capability(device)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return Architecture((major, minor), int(properties["max_shared_mem"]))
