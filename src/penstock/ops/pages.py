"""Memory for what is read in every step."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE = 2 * 2**20
"""Bytes of a huge page."""


def zeros(size: int) -> Tensor:
    """``[size]`` uint8, in huge pages where they pay: with small ones, finding where a page lies can take as long as
    reading it."""
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    # The system's own zeros, which take memory when they are first written: gigabytes cost no start-up.
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size]
