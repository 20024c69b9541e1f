"""Draft heads: what drafts the tokens after the next one from the model's hidden states, as MTP layers do, and heads of
EAGLE and Medusa."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..step import RowUpdates, SampledTokens
from .drafter import DraftBuilder, VerifiedStep
from .input_batch import InputBatch
from .model_runner import ModelRunner


class FirstDraft(NamedTuple):
    """The first draft token of a row, and the hidden state that the second is drafted from."""

    length: int
    """Tokens of the row before the draft token."""
    sampled: SampledTokens
    state: Tensor
    """``[hidden]`` of the head at position ``length - 2``."""


class HeadDrafter:
    """Drafts with the model's ``draft_heads``, which read its hidden states. The first head drafts the first token, and
    the last one all that are left, if it is ``recurrent``.

    ``after_step`` computes their keys and values for the tokens of each step, in the model's KV cache. They are missing
    at the last position of a cached prefix, and in one that comes from a lower tier, which only lowers acceptance.

    Args:
        runner: of the model.
        batch: the worker's rows.
    """

    def __init__(self, runner: ModelRunner, batch: InputBatch) -> None:
        self._runner = runner
        self._batch = batch
        self.needs_all_hidden_states = not runner.model.aux_hidden_state_layers
        self._first: dict[int, FirstDraft] = {}
        """The first draft token of each row, by row number."""

    def init_cache(self, blocks: int) -> None:
        """Nothing to do: the layers' cache is part of the model's."""

    def apply(self, updates: RowUpdates) -> None:
        for new in updates.new:
            self._first.pop(new.row, None)
        for row in updates.forks[::3].tolist():
            self._first.pop(row, None)

    def propose(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> list[list[int] | None]:
        drafts = DraftBuilder(len(rows))
        states: dict[int, Tensor] = {}
        """Hidden states for the next draft token, by index of the rows whose drafts go on."""

        def add(i: int, result: SampledTokens, state: Tensor, position: int) -> None:
            if (token := drafts.add(i, result)) is None:
                states.pop(i, None)
            else:
                states[i] = state
                self._batch.tokens[rows[i], position] = token

        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            first = self._first.get(row)
            if first and first.length == length:
                add(i, first.sampled, first.state, length)
        heads = self._runner.model.draft_heads
        longest = int(counts.max(initial=0))
        for place in range(1, longest if heads[-1].recurrent else min(longest, len(heads))):
            states = {i: state for i, state in states.items() if counts[i] > place}
            if not states:
                break
            at = list(states)
            starts = lengths[at] + place - 2
            number = min(place, len(heads) - 1)
            stacked = torch.stack(list(states.values()))
            last, sampled = self._run(number, rows[at], starts, np.ones_like(starts), stacked)
            for i, state, result in zip(at, last, sampled, strict=True):
                add(i, result, state, lengths[i] + place)
        return drafts.token_ids

    def after_step(self, step: VerifiedStep) -> None:
        """Compute the keys and values of the step's tokens, and the first draft token of each row that sampled."""
        sampled = step.sampled
        items: list[tuple[int, int, int]] = []
        states: list[int] = []
        end = 0
        columns = (step.rows, step.starts, step.lengths, step.drafts)
        for row, start, length, drafted in zip(*(column.tolist() for column in columns), strict=True):
            begin, end = end, end + length + drafted
            for own in (row, *step.forks.get(row, ())):
                result = sampled.get(own)
                if self._batch.row(own).num_candidates or (result and result.failure):
                    continue
                count = length + (len(result.token_ids) - 1 if result else 0)
                first = 0 if own == row else count - 1  # forked rows share the blocks of all tokens but the last
                items.append((own, start + first, count - first))
                states += range(begin + first, begin + count)
        if not items:
            return
        rows, starts, counts = np.array(items).T
        combined = self._runner.model.draft_heads[0].combine_hidden_states(step.hidden[states])
        last, drafted = self._run(0, rows, starts, counts, combined)
        lengths = (starts + counts + 1).tolist()
        for row, length, state, result in zip(rows.tolist(), lengths, last, drafted, strict=True):
            if row in sampled:
                self._first[row] = FirstDraft(length, result, state)

    def reset(self) -> None:
        self._first.clear()

    def _run(
        self, number: int, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, states: Tensor
    ) -> tuple[Tensor, list[SampledTokens]]:
        """Compute ``counts`` positions from ``starts`` on of each row with head ``number``.

        Args:
            states: ``[counts.sum(), hidden]``: hidden states at these positions, of the model or of the head before.

        Returns:
            The head's hidden state at each row's last position, ``[rows, hidden]``, and the token drafted from it.
        """
        batch = self._batch.flatten(rows, starts, counts, np.ones_like(counts), shift=1)
        model = self._runner.model
        head = model.draft_heads[number]
        cache = self._runner.cache[model.config.num_layers + number] if head.attention else None
        last = head.forward(batch.to(states.device), states, cache)
        own = [self._batch.row(row) for row in rows]
        lengths = (starts + counts + 1).tolist()
        positions = [row.draft_position(length) for row, length in zip(own, lengths, strict=True)]
        return last, self._runner.sample(last, positions, head=head).result()
