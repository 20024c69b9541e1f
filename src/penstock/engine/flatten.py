"""From a plan to the flat batch that a model computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.ops import Batch, Queries

from .plan import Item, Plan
from .sequence import Sequence


class Flattener:
    """Lays plans out flat. The block numbers of running sequences stay here from step to step.

    Args:
        rows: sequences that may run at the same time.
        longest: tokens a sequence may have.
    """

    def __init__(self, rows: int, longest: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((rows, -(-longest // block_size)), np.int32)
        self._laid: list[list[int] | None] = [None] * rows

    def __call__(self, plan: Plan) -> Batch:
        """The batch of a plan with at least one item."""
        token_ids: list[int] = []
        for sequence, start, length, _ in plan.items:
            self._place(sequence, start)
            token_ids += sequence.tokens[start : start + length]
        rows = np.array([item.sequence.row for item in plan.items])
        starts = np.array([item.start for item in plan.items])
        lengths = np.array([item.length for item in plan.items])
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = self._tables[np.repeat(rows, lengths), blocks].astype(np.int64) * self._block_size + offsets
        total = starts + lengths
        most_blocks = -(-int(total.max()) // self._block_size)

        def tensor(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values, dtype=dtype).to(self._device)

        def queries(counts: np.ndarray) -> Queries:
            """Of each item so many of its last tokens."""
            some = counts > 0
            return Queries(
                starts=tensor(np.concatenate(([0], np.cumsum(counts[some]))), torch.int32),
                lengths=tensor(total[some], torch.int32),
                block_tables=tensor(self._tables[rows[some], :most_blocks], torch.int32),
            )

        wanted = np.array([scores_wanted(item) for item in plan.items])
        every = queries(lengths)
        return Batch(
            token_ids=tensor(token_ids, torch.int64),
            positions=tensor(positions, torch.int64),
            slots=tensor(slots, torch.int64),
            queries=every,
            logit_rows=tensor(np.arange(wanted.sum()) + np.repeat(ends - np.cumsum(wanted), wanted), torch.int64),
            logit_queries=every if (wanted == lengths).all() else queries(wanted),
        )

    def _place(self, sequence: Sequence, start: int) -> None:
        """Bring the sequence's row of block numbers up to date: all of it where the list of blocks is another, as it is
        whenever a sequence begins to run, be it again and in the same row; else what is written."""
        first = start // self._block_size
        if self._laid[sequence.row] is not sequence.blocks:
            self._laid[sequence.row], first = sequence.blocks, 0
        held = len(sequence.blocks)
        self._tables[sequence.row, first:held] = sequence.blocks[first:]


def prompt_tokens(item: Item) -> list[int]:
    """The prompt tokens that this item's tokens predict, where their probabilities are wanted."""
    sequence = item.sequence
    if sequence.prompt_logprobs is None:
        return []
    return sequence.tokens[item.start + 1 : min(item.start + item.length + 1, sequence.prompt_length)]


def scores_wanted(item: Item) -> int:
    """Of how many of an item's tokens, its last ones: all where its prompt is to be told, else one where it is due a
    draw."""
    return item.length if prompt_tokens(item) else bool(item.samples)
