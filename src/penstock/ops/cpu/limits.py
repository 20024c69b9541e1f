"""Threads of the kernels, and the memory bandwidth and arithmetic rates that bound them on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _kernels, pages
from ..cores import usable_cores


def set_threads(count: int) -> None:
    """Set the number of threads that share a kernel's work; 0 is all usable cores. Results do not depend on it."""
    _kernels.set_threads(count or usable_cores())


@dataclass(frozen=True)
class Limits:
    """Rates of this machine's hardware, of all threads together."""

    read: float
    """Memory read bandwidth, bytes a second."""
    bfloat16: float
    """Multiply-adds of bfloat16 a second, counted as two operations each."""
    int8: float
    """Multiply-adds of 8-bit integers a second, counted as two operations each."""


def measure_limits(size: int = 2**29) -> Limits:
    """Measure the limits; takes about half a second and ``size`` bytes of memory."""
    memory = pages.zeros(size, huge=True)
    memory.fill_(1)
    fastest = min(_kernels.time_read(memory.data_ptr(), size) for _ in range(8))
    rates = [max(_kernels.dot_rate(integers, 2_000_000) for _ in range(4)) for integers in (False, True)]
    return Limits(size / fastest, *rates)
