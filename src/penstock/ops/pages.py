"""Memory from the operating system: lazily allocated zeroed pages, and mapped files."""

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
"""``MADV_POPULATE_READ`` (Linux 5.14): read and map the whole range immediately instead of at the first access."""


def zeros(size: int, huge: bool = False) -> Tensor:
    """Allocate zeros, ``[size]`` uint8. A page uses memory from its first write on.

    Args:
        huge: use huge pages (2 MiB). They are faster for memory that every step reads: address translation of small
            pages can take as long as reading them. They waste memory that is filled gradually: the first byte written
            allocates a whole page.
    """
    if size == 0:
        return torch.zeros(0, dtype=torch.uint8)
    huge = huge and size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE")
    memory = mmap.mmap(-1, size + HUGE if huge else size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if not huge:
        return whole
    start = -whole.data_ptr() % HUGE
    end = start + size // HUGE * HUGE
    with contextlib.suppress(OSError):  # some systems do not support huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
        memory.madvise(mmap.MADV_NOHUGEPAGE, end)  # otherwise the last bytes of each matrix would take a huge page
    return whole[start : start + size]


def mapped(file: IO[bytes]) -> Tensor:
    """Map a non-empty file read-only, ``[bytes]`` uint8. Processes that map it share its pages, which are huge pages if
    the system supports them for files."""
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(OSError, AttributeError):  # some systems do not support huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    with contextlib.suppress(OSError):
        memory.madvise(POPULATE_READ)
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns about read-only memory
        return torch.frombuffer(memory, dtype=torch.uint8)
