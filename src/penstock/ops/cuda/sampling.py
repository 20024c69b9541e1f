"""Sampling: argmax, grammar bitmasks, log probabilities, top-k, and random sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import power_of_two
from .kernels import sampling as kernels
from .launch import launch
from .matrix import Matrix, linear

COLUMNS = 4096
"""Number of columns of a row that a program loads at a time."""
RANDOM_COLUMNS = 2048
"""Number of columns that a program of random sampling loads at a time: with 16 warps, no register is spilled."""
MAX_K = 64
"""Maximum ``k`` of the kernel; larger values use PyTorch."""
MAX_LISTED = 16384
"""Maximum number of candidate tokens of a row that random sampling stores in a list."""


def argmax(x: Tensor, matrix: Matrix, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``reference.argmax``."""
    return argmax_of_logits(linear(x, matrix, out_float32=True), bitmask)


def argmax_of_logits(logits: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the index of the largest value of each row of ``[rows, outputs]`` float32, and the value.

    Args:
        bitmask: argument of ``reference.argmax``.
    """
    rows, columns = logits.shape
    blocks = -(-columns // COLUMNS)
    values, largest = logits.new_empty(rows, blocks), logits.new_empty(rows)
    indices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    index = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bitmask_stride = 0 if bitmask is None else bitmask.stride(0)
    sizes = (columns, logits.stride(0), bitmask_stride)
    launch(kernels.argmax_blocks, (rows, blocks), logits, bitmask, values, indices, *sizes, BLOCK=COLUMNS, num_warps=8)
    launch(kernels.argmax_rows, (rows,), values, indices, largest, index, blocks, BLOCKS=power_of_two(blocks))
    return index, largest


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """See ``reference.apply_bitmask``."""
    rows, columns = logits.shape
    grid = (rows, -(-columns // COLUMNS))
    sizes = (columns, logits.stride(0), bitmask.stride(0))
    launch(kernels.apply_bitmask, grid, logits, bitmask, *sizes, BLOCK=COLUMNS, num_warps=8)
    return logits


def log_softmax(logits: Tensor) -> Tensor:
    """See ``reference.log_softmax``. The bits of a row depend neither on other rows nor on its address."""
    rows, columns = logits.shape
    out = logits.new_empty(rows, columns)
    launch(kernels.log_softmax, (rows,), logits, out, columns, logits.stride(0), BLOCK=COLUMNS, num_warps=16)
    return out


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See ``reference.topk``. Ties go to the lower index."""
    rows, columns = values.shape
    if k > MAX_K:
        return torch.topk(values, k, -1)
    blocks = -(-columns // COLUMNS)
    parts = values.new_empty(rows, blocks * k), torch.empty(rows, blocks * k, dtype=torch.int32, device=values.device)
    result = values.new_empty(rows, k), torch.empty(rows, k, dtype=torch.int32, device=values.device)
    launch(kernels.topk, (rows, blocks), values, None, *parts, columns, values.stride(0), k, BLOCK=COLUMNS, num_warps=8)
    block = power_of_two(blocks * MAX_K)  # the size does not depend on k, so that the kernel is compiled only once
    launch(kernels.topk, (rows, 1), *parts, *result, blocks * k, blocks * k, k, BLOCK=block, num_warps=8)
    return result[0], result[1].long()


def sample_random(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``reference.sample_random``. The bits of a row do not depend on other rows."""
    rows, vocabulary = logits.shape
    device, blocks = logits.device, power_of_two(-(-vocabulary // RANDOM_COLUMNS))
    out = torch.empty(rows, dtype=torch.int64, device=device)
    launch(
        kernels.sample_random,
        (rows,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniform,
        torch.empty(rows, MAX_LISTED, device=device),
        torch.empty(rows, MAX_LISTED, dtype=torch.int32, device=device),
        torch.empty(rows, blocks, dtype=torch.float64, device=device),
        out,
        vocabulary,
        logits.stride(0),
        MAX_LISTED=MAX_LISTED,
        BLOCK=RANDOM_COLUMNS,
        BLOCKS=blocks,
        num_warps=16,
    )
    greedy, largest = argmax_of_logits(logits)
    return torch.where(temperature == 0, greedy, out), largest
