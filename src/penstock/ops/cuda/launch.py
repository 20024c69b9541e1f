"""Launches of Triton kernels: on the GPU, by Triton's interpreter on a CPU, or recorded to be compiled for GPUs that
are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when this module was imported): on CPU tensors,
for tests. It multiplies bfloat16 wrongly, so tests compute in float32 and float16."""
DEFAULT_SM_COUNT = 132
"""Multiprocessors that grids are sized for where launches are recorded: an H100's."""
INTERPRETED_SM_COUNT = 2
"""Where they are interpreted, one program after the other."""

MIN_FP8 = (8, 9)
"""Compute capability from which on there are products of 8-bit floating-point numbers, and conversions to them."""


@dataclass(frozen=True)
class Architecture:
    """What kernels are chosen by, of a GPU."""

    capability: tuple[int, int]
    """Compute capability."""
    shared_memory: int
    """Bytes of shared memory that one program may have."""


ARCHITECTURES = {
    80: Architecture((8, 0), 166912),
    90: Architecture((9, 0), 232448),
    100: Architecture((10, 0), 232448),
}
"""Data center GPUs (A100, H100, B200), for which kernels are compiled where there is no GPU."""
DEFAULT_ARCHITECTURE = ARCHITECTURES[90]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, recorded."""

    kernel: Any
    args: tuple[Any, ...]
    """Positional arguments: tensors, numbers and None."""
    constants: dict[str, Any]
    """Arguments annotated ``tl.constexpr``."""
    num_warps: int
    num_stages: int


_recorded: list[Launch] | None = None
_recorded_for: Architecture | None = None


@contextmanager
def record_launches(target: Architecture = DEFAULT_ARCHITECTURE) -> Iterator[list[Launch]]:
    """Within this context launches are listed, as they would be on ``target``, and nothing is computed: what ops return
    is not initialized."""
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
    """Launch a kernel; nothing happens where the grid is empty.

    Multiplications and additions are never contracted to fused ones, except where a kernel says so (``tl.fma``), so
    that a result does not depend on which of a kernel's variants computes it.
    """
    if 0 in grid:
        return
    if _recorded is not None:
        _recorded.append(Launch(kernel, args, constants, num_warps, num_stages))
        return
    kernel[tuple(grid)](*args, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU, by which grids of persistent kernels are sized. Results do not depend on it."""
    if device.type != "cuda":
        return INTERPRETED_SM_COUNT if _recorded is None else DEFAULT_SM_COUNT
    return _sm_count(device)


@cache
def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def architecture(device: torch.device) -> Architecture:
    """Of a GPU; where there is none, of what launches are recorded for, or an H100."""
    return _recorded_for or _architecture(device)


@cache
def _architecture(device: torch.device) -> Architecture:
    if device.type != "cuda":
        return DEFAULT_ARCHITECTURE
    major, minor = torch.cuda.get_device_capability(device)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return Architecture((major, minor), int(properties["max_shared_mem"]))
