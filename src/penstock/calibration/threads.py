"""Thread pools for calibration: each thread computes a different matrix or candidate.

PyTorch's intra-op threads affect the order of sums, and synchronize after every small operation. Here each thread uses
one intra-op thread, so that results do not depend on the number of threads.
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
    """Yield ``function(item)`` for each item, in order. At most ``threads`` results are held at a time."""
    remaining = iter(items)
    with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
        while chunk := list(islice(remaining, threads)):
            yield from pool.map(torch.inference_mode()(function), chunk)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of PyTorch's intra-op threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
