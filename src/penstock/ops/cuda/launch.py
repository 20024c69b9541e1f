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
"""Multiprocessors that grids are sized for where there is no GPU."""


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


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Within this context launches are listed and nothing is computed: what ops return is not initialized."""
    global _recorded
    _recorded = launches = list[Launch]()
    try:
        yield launches
    finally:
        _recorded = None


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


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU, by which grids of persistent kernels are sized. Results do not depend on it."""
    if device.type != "cuda":
        return DEFAULT_SM_COUNT
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
