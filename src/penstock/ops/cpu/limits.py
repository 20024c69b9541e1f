"""Number of threads of the kernels, and measured limits of this machine: memory bandwidth and arithmetic rates."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _kernels, pages
from ..cores import usable_cores


def set_threads(count: int) -> None:
    """Set the number of threads of the kernels; 0: all usable cores. Results do not depend on this number."""
    _kernels.set_threads(count or usable_cores())


@dataclass(frozen=True)
class Limits:
    """Hardware limits of this machine with all threads."""

    read: float
    """Memory read bandwidth in bytes per second."""
    bfloat16: float
    """bfloat16 operations per second; a multiply-add is two operations."""
    int8: float
    """8-bit integer operations per second; a multiply-add is two operations."""


def measure_limits(size: int = 2**29) -> Limits:
    """Measure the limits. This takes about half a second and ``size`` bytes of memory."""
    memory = pages.zeros(size, huge=True)
    memory.fill_(1)
    fastest = min(_kernels.time_read(memory.data_ptr(), size) for _ in range(8))
    rates = [max(_kernels.dot_rate(integers, 2_000_000) for _ in range(4)) for integers in (False, True)]
    return Limits(size / fastest, *rates)
