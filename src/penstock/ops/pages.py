"""Memory straight from the system: zeros that take room when they are first written, and files as they lie there."""

from __future__ import annotations

import contextlib
import mmap
import warnings
from typing import IO

import torch
from torch import Tensor

HUGE = 2 * 2**20
"""Bytes of a huge page."""
POPULATE_READ = 22
"""To ``madvise`` (Linux 5.14): read and map all of it now, not when it is first needed."""


def zeros(size: int, huge: bool = False) -> Tensor:
    """``[size]`` uint8.

    Args:
        huge: in huge pages, which pay for what is read in every step: with small ones, finding where a page lies can
            take as long as reading it. For what is written bit by bit they do not: the first byte takes a whole one.
    """
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8)
    huge = huge and size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE")
    memory = mmap.mmap(-1, size + HUGE if huge else size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if not huge:
        return whole
    with contextlib.suppress(OSError):  # of systems without
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size]


def mapped(file: IO[bytes]) -> Tensor:
    """A file that is not empty, ``[bytes]`` uint8, to read only: nothing is copied, and processes share it.

    In huge pages as far as the system has them for files.
    """
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(OSError, AttributeError):  # of systems without
        memory.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):
        memory.madvise(POPULATE_READ)
    with warnings.catch_warnings(action="ignore"):  # that it cannot be written to
        return torch.frombuffer(memory, dtype=torch.uint8)
