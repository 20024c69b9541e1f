"""Timing of GPU work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(run: Callable[[], object], device: torch.device, repeat: int = 20, warm: int = 3) -> float:
    """Median time of a call in seconds, measured with CUDA events."""
    if device.type == "cpu":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    for _ in range(warm):
        run()
    taken = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def seconds_of_many(run: Callable[[], object], device: torch.device, count: int) -> float:
    """Time per call in seconds of ``count`` calls without synchronization in between."""
    if device.type == "cpu":
        return seconds(run, device)

    def calls() -> None:
        for _ in range(count):
            run()

    return seconds(calls, device, repeat=5, warm=1) / count
