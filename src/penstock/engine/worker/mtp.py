"""Layers of the model itself that draft what comes after the next token (multi-token prediction)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..step import Draw, RowUpdates
from .input_batch import InputBatch
from .model_runner import ModelRunner


class First(NamedTuple):
    """The first draft token of a row, and what the second is drafted from."""

    length: int
    """Tokens that the row has before it."""
    token: int
    state: Tensor
    """``[hidden]``"""


class MTPDrafter:
    """Drafts with the model's own layers for multi-token prediction, which read what it has made of each token.

    They follow every step, so that their keys and values are there for all tokens, in the model's own cache. What they
    lack after a swap, or at the last place of a shared prefix, only lowers acceptance.
    """

    needs_all_states = True

    def __init__(self, runner: ModelRunner, batch: InputBatch) -> None:
        self._runner = runner
        self._batch = batch
        self._layers = runner.model.mtp_heads  # the last one drafts whatever is further on, too
        self._first: dict[int, First] = {}
        """By row."""

    def init_cache(self, blocks: int) -> None:
        """It is part of the model's."""

    def apply(self, updates: RowUpdates) -> None:
        for new in updates.new:
            self._first.pop(new.row, None)
        for row in updates.forks[::3].tolist():
            self._first.pop(row, None)

    def propose(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in rows]
        states: dict[int, Tensor] = {}
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            first = self._first.get(row)
            if first and first.length == length:
                found[i].append(first.token)
                states[i] = first.state
                self._batch.tokens[row, length] = first.token
        for place in range(1, int(counts.max(initial=0))):
            states = {i: state for i, state in states.items() if counts[i] > place}
            if not states:
                break
            at = list(states)
            starts = lengths[at] + place - 2
            layer = min(place, len(self._layers) - 1)
            last, draws = self._run(layer, rows[at], starts, np.ones_like(starts), torch.stack(list(states.values())))
            for i, state, draw in zip(at, last, draws, strict=True):
                found[i].append(token := draw.token_ids[0])
                states[i] = state
                self._batch.tokens[rows[i], lengths[i] + place] = token
        return found

    def after_step(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        drafts: np.ndarray,
        draws: dict[int, Draw],
        forks: dict[int, list[int]],
        hidden: Tensor,
    ) -> None:
        """Compute keys and values of what the model has computed, and the first draft token."""
        items: list[tuple[int, int, int]] = []
        states: list[int] = []
        end = 0
        for row, start, length, drafted in zip(
            rows.tolist(), starts.tolist(), lengths.tolist(), drafts.tolist(), strict=True
        ):
            begin, end = end, end + length + drafted
            for own in (row, *forks.get(row, ())):
                draw = draws.get(own)
                if self._batch.row(own).num_candidates or (draw and draw.failure):
                    continue
                count = length + (len(draw.token_ids) - 1 if draw else 0)
                first = 0 if own == row else count - 1  # siblings share all but the last one
                items.append((own, start + first, count - first))
                states += range(begin + first, begin + count)
        if not items:
            return
        own, first, count = np.array(items).T
        last, found = self._run(0, own, first, count, hidden[states])
        for row, length, state, draw in zip(own.tolist(), (first + count + 1).tolist(), last, found, strict=True):
            if row in draws:
                self._first[row] = First(length, draw.token_ids[0], state)

    def _run(
        self, number: int, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, states: Tensor
    ) -> tuple[Tensor, list[Draw]]:
        """Compute positions with one of the layers.

        Args:
            states: ``[tokens, hidden]``, of the tokens at those positions.

        Returns:
            The layer's own hidden state at each row's last position, ``[rows, hidden]``, and the tokens after the next.
        """
        batch = self._batch.flatten(rows, starts, counts, counts.copy(), shift=1)
        model = self._runner.model
        layer = self._layers[number]
        hidden = layer.hidden(batch, states, self._runner.cache[model.config.num_layers + number])
        last = hidden[torch.from_numpy(counts.cumsum() - 1).to(hidden.device)]
        own = [self._batch.row(row) for row in rows]
        lengths = (starts + counts + 1).tolist()
        positions = [row.draft_position(length) for row, length in zip(own, lengths, strict=True)]
        return last, self._runner.sample(last, positions)
