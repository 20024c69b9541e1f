"""Timestamps of a transcript's tokens from Whisper's alignment heads (OpenAI's ``timing.py``, transformers'
``return_token_timestamps``): the heads' attention to the audio is normalized and smoothed, and dynamic time warping
finds the path through tokens and audio with the most attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

ROWS_AT_ONCE = 32
"""Number of tokens whose attention is smoothed together; this amount fits into a core's cache."""


def token_times(queries: Tensor, keys: Tensor, length: int, filter_width: int) -> np.ndarray:
    """Index of the audio encoder's hidden state at which the speech of each token ends, ``[tokens]`` int64.

    The query of a token attends to the audio of the next token.

    Args:
        queries: ``[heads, tokens, head_dim]`` of the alignment heads.
        keys: ``[heads, positions, head_dim]`` of the same heads for a window of audio.
        length: number of leading positions that are not padding.
        filter_width: ``SpeechConfig.median_filter_width``.
    """
    total = torch.zeros(queries.shape[1], length)
    with _one_thread():  # with several threads, sums would depend on the number of threads
        for q, k in zip(queries.float(), keys.float(), strict=True):
            weights = (q * q.shape[-1] ** -0.5 @ k.T).softmax(-1)[:, :length]
            std, mean = torch.std_mean(weights, 0, correction=0)
            normalized = torch.where(std > 0, (weights - mean) / std, 0.0)
            for rows, smoothed in zip(total.split(ROWS_AT_ONCE), normalized.split(ROWS_AT_ONCE), strict=True):
                rows += _median_filter(smoothed, filter_width)
        total /= len(queries)
    return _first_columns(-total.double().numpy())


def alignment_bytes(tokens: int, positions: int) -> int:
    """Approximate maximum memory of ``token_times`` in bytes."""
    return tokens * positions * (4 * torch.float32.itemsize + 2 * torch.float64.itemsize + 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _median_filter(x: Tensor, width: int) -> Tensor:
    """Median filter over the last dimension, with reflection at the ends. If the dimension is too short for reflection,
    ``x`` is returned unmodified."""
    half, size = width // 2, x.shape[-1]
    if size <= half:
        return x
    padded = F.pad(x[None], (half, half), mode="reflect")[0]
    values = [padded[..., i : i + size] for i in range(width)]
    for last in range(width - 1, half - 1, -1):  # bubble sort, until the larger half is in place
        for i in range(last):
            values[i], values[i + 1] = torch.minimum(values[i], values[i + 1]), torch.maximum(values[i], values[i + 1])
    return values[half]


def _first_columns(costs: np.ndarray) -> np.ndarray:
    """Dynamic time warping: the column at which the cheapest path enters each row, ``[rows]`` int64.

    The path leads from the first to the last element of ``costs``, with steps to the next row, column, or both. As in
    transformers, sums are float32, and a tie goes to the step to the next column.

    Args:
        costs: ``[rows, columns]`` float64.
    """
    rows, columns = costs.shape
    padded = np.full((rows, columns + rows), np.inf)
    padded[:, :columns] = costs
    item = padded.itemsize
    shape, strides = (rows + columns - 1, rows), (item, (columns + rows - 1) * item)
    diagonals = np.lib.stride_tricks.as_strided(padded, shape, strides, writeable=False)  # [d, i] is costs[i, d - i]
    steps = np.empty(shape, np.int8)  # last step of the path: 0: next row and column, 1: next row, 2: next column
    before = np.full(rows + 1, np.inf, np.float32)  # sums of a diagonal; index 0 is a border before the first row
    last = before.copy()
    before[0] = 0.0
    for d in range(len(diagonals)):
        both, row, column = before[:-1], last[:-1], last[1:]
        is_both, is_row = (both < row) & (both < column), (row < both) & (row < column)
        steps[d] = np.where(is_both, 0, np.where(is_row, 1, 2))
        sums = np.full(rows + 1, np.inf, np.float32)
        sums[1:] = diagonals[d] + np.where(is_both, both, np.where(is_row, row, column))
        before, last = last, sums
    first = np.zeros(rows, np.int64)
    i, j = rows - 1, columns - 1
    while i >= 0:
        first[i] = j
        step = steps[i + j, i] if j else 1
        i, j = i - (step != 2), j - (step != 1)
    return first
