"""Multi-token prediction (MTP): layers of the model itself draft the tokens after the next one."""

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
    """``[hidden]`` of the MTP layer at position ``length - 2``."""


class MTPDrafter:
    """Drafts with the model's MTP layers, which read the model's last hidden states.

    ``after_step`` computes their keys and values for the tokens of each step, in the model's KV cache. They are missing
    after a swap, and at the last position of a cached prefix, which only lowers acceptance.

    Args:
        runner: of the model.
        batch: the worker's rows.
    """

    needs_all_hidden_states = True

    def __init__(self, runner: ModelRunner, batch: InputBatch) -> None:
        self._runner = runner
        self._batch = batch
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
        for place in range(1, int(counts.max(initial=0))):
            states = {i: state for i, state in states.items() if counts[i] > place}
            if not states:
                break
            at = list(states)
            starts = lengths[at] + place - 2
            layer = min(place, len(self._runner.model.mtp_heads) - 1)  # the last one drafts all that are left
            last, sampled = self._run(layer, rows[at], starts, np.ones_like(starts), torch.stack(list(states.values())))
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
        last, drafted = self._run(0, rows, starts, counts, step.hidden[states])
        lengths = (starts + counts + 1).tolist()
        for row, length, state, result in zip(rows.tolist(), lengths, last, drafted, strict=True):
            if row in sampled:
                self._first[row] = FirstDraft(length, result, state)

    def reset(self) -> None:
        self._first.clear()

    def _run(
        self, number: int, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, states: Tensor
    ) -> tuple[Tensor, list[SampledTokens]]:
        """Compute ``counts`` positions from ``starts`` on of each row with layer ``number``.

        Args:
            states: ``[counts.sum(), hidden]``: hidden states at these positions, of the model or of the layer before.

        Returns:
            The layer's hidden state at each row's last position, ``[rows, hidden]``, and the token drafted from it: the
            one after the next.
        """
        batch = self._batch.flatten(rows, starts, counts, counts.copy(), shift=1)
        model = self._runner.model
        layer = model.mtp_heads[number]
        hidden = layer.forward(batch.to(states.device), states, self._runner.cache[model.config.num_layers + number])
        last = hidden[torch.from_numpy(counts.cumsum() - 1).to(hidden.device)]
        own = [self._batch.row(row) for row in rows]
        lengths = (starts + counts + 1).tolist()
        positions = [row.draft_position(length) for row, length in zip(own, lengths, strict=True)]
        return last, self._runner.sample(last, positions).result()
