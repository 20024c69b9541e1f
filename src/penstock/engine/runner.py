"""Runs plans: one forward pass over a flat batch, and a draw for every sequence that is due one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core import Logprob
from penstock.models import Decoder
from penstock.ops import Batch, Ops

from .plan import Draw, Item, Outcome, Plan
from .sampler import logprobs, sample
from .sequence import Sequence

ROWS_AT_ONCE = 256
"""Rows of scores held at a time where those of a whole prompt are wanted: a large vocabulary's take megabytes each."""


class Runner:
    """A model with its KV cache.

    Args:
        blocks: of the cache.
        host_blocks: of the host tier.
        rows: sequences that may run at the same time.
        longest: tokens a sequence may have.
    """

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        device: torch.device,
        *,
        blocks: int,
        host_blocks: int,
        block_size: int,
        rows: int,
        longest: int,
    ) -> None:
        self._model = model
        self._ops = ops
        self._device = device
        self._block_size = block_size
        spec = model.kv_spec(block_size)
        self._cache: list[Any] = ops.new_cache(spec, blocks, device)
        self._host: list[Any] = ops.new_cache(spec, host_blocks, torch.device("cpu"))
        self._tables = np.zeros((rows, -(-longest // block_size)), np.int32)
        self._tenants: list[Sequence | None] = [None] * rows

    def submit(self, plan: Plan) -> Outcome:
        """Start a step; ``collect`` has its outcome. On a CPU it is done when this returns."""
        self._ops.copy_blocks(self._cache, self._host, plan.swap_out)
        self._ops.copy_blocks(self._host, self._cache, plan.swap_in)
        self._ops.copy_blocks(self._cache, self._cache, plan.copies)
        if not plan.items:
            return Outcome([])
        hidden = self._model(self._batch(plan), self._cache)
        return self._draw(plan, hidden)

    def collect(self, handle: Outcome) -> Outcome:
        return handle

    # --- Before the pass --------------------------------------------------------------------------------------------

    def _batch(self, plan: Plan) -> Batch:
        """Lay the plan out flat."""
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

        return Batch(
            token_ids=tensor(token_ids, torch.int64),
            positions=tensor(positions, torch.int64),
            slots=tensor(slots, torch.int64),
            query_starts=tensor(np.concatenate(([0], ends)), torch.int32),
            lengths=tensor(total, torch.int32),
            block_tables=tensor(self._tables[rows, :most_blocks], torch.int32),
            logit_rows=tensor(_rows_with_scores(plan), torch.int64),
        )

    def _place(self, sequence: Sequence, start: int) -> None:
        """Bring the sequence's row of block numbers up to date: all of it for a new tenant, else what is written."""
        first = start // self._block_size
        if self._tenants[sequence.row] is not sequence:
            self._tenants[sequence.row], first = sequence, 0
        held = len(sequence.blocks)
        self._tables[sequence.row, first:held] = sequence.blocks[first:]

    # --- After the pass ---------------------------------------------------------------------------------------------

    def _draw(self, plan: Plan, hidden: Tensor) -> Outcome:
        """Draw what is due; ``hidden`` has the rows that ``_rows_with_scores`` names."""
        last_rows: list[int] = []
        sequences: list[Sequence] = []
        prompts: dict[int, list[list[Logprob]]] = {}
        row = 0
        for i, item in enumerate(plan.items):
            told = _prompt_tokens(item)
            if told:
                prompts[i] = self._prompt_logprobs(hidden[row : row + len(told)], told, item.sequence)
            count = item.length if told else bool(item.samples)
            row += count
            last_rows += [row - 1] * len(item.samples)
            sequences += item.samples
        draws: list[Draw] = []
        if sequences:
            draws = sample(self._model.scores(hidden[last_rows]), sequences)
        return Outcome(draws, prompts)

    def _prompt_logprobs(self, hidden: Tensor, tokens: list[int], sequence: Sequence) -> list[list[Logprob]]:
        wanted = sequence.request.sampling.prompt_logprobs or 0
        told = []
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            scores = self._model.scores(hidden[start : start + ROWS_AT_ONCE])
            chosen = torch.tensor(tokens[start : start + ROWS_AT_ONCE], device=scores.device)
            told += logprobs(scores, chosen, [wanted] * len(chosen))
        return told


def _prompt_tokens(item: Item) -> list[int]:
    """The prompt tokens that this item's tokens predict, where their probabilities are wanted."""
    sequence = item.sequence
    if sequence.prompt_logprobs is None:
        return []
    return sequence.tokens[item.start + 1 : min(item.start + item.length + 1, sequence.prompt_length)]


def _rows_with_scores(plan: Plan) -> list[int]:
    """Rows of the flat batch: all of an item whose prompt is to be told, else its last where it is due a draw."""
    rows: list[int] = []
    begin = 0
    for item in plan.items:
        end = begin + item.length
        if _prompt_tokens(item):
            rows += range(begin, end)
        elif item.samples:
            rows.append(end - 1)
        begin = end
    return rows
