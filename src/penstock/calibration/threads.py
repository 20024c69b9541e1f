"""Threads for the searches of calibration: each computes another matrix, or another candidate.

PyTorch's own threads choose the order of sums, and wait for each other after every small operation. So each thread here
computes alone, and results do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """``function`` of each item, in their order; no more results are held at a time than there are threads."""
    remaining = iter(items)
    with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
        while part := list(islice(remaining, threads)):
            yield from pool.map(torch.inference_mode()(function), part)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give PyTorch's operations so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
