"""Runs a model's draft heads over rows of the batch."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...step import SampledTokens
from ..input_batch import InputBatch
from ..model_runner import ModelRunner
from ..row import Position
from .tree_rows import SlotCopies


class HeadRunner:
    """Runs the ``draft_heads`` of a model. Methods take the index of the draft token: head ``i`` drafts token ``i``. If
    ``recurrent``, the last head also drafts all later tokens.

    Args:
        runner: runner of the model.
        batch: the worker's rows.
    """

    def __init__(self, runner: ModelRunner, batch: InputBatch) -> None:
        self._runner = runner
        self._batch = batch

    @property
    def count(self) -> int:
        """Number of draft heads of the model."""
        return len(self._runner.model.draft_heads)

    @property
    def recurrent(self) -> bool:
        """True if the last head drafts all later tokens, so that drafts may be longer than the number of heads."""
        return self._runner.model.draft_heads[-1].recurrent

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        """Call ``DraftHead.combine_hidden_states`` of the first head."""
        return self._runner.model.draft_heads[0].combine_hidden_states(states)

    def forward(self, index: int, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, states: Tensor) -> Tensor:
        """Compute ``counts`` positions of each row, from ``starts`` on. Returns the head's hidden state at the last
        position of each row, ``[rows, hidden]``.

        Args:
            states: hidden states of the model or the previous head at these positions, ``[counts.sum(), hidden]``.
        """
        batch = self._batch.flatten(rows, starts, counts, np.ones_like(counts), shift=1)
        number = self._number(index)
        head = self._runner.model.draft_heads[number]
        return head.forward(
            batch.to(states.device), states, self._runner.cache[self._layer(number)] if head.attention else None
        )

    def sample(self, index: int, states: Tensor, rows: np.ndarray, lengths: np.ndarray) -> list[SampledTokens]:
        """Sample a token after the first ``lengths`` tokens of each row.

        Args:
            states: hidden states of the head, ``[rows, hidden]``.
        """
        head = self._runner.model.draft_heads[self._number(index)]
        return self._runner.sample(states, self._positions(rows, lengths), head=head).result()

    def sample_and_rank(
        self, index: int, states: Tensor, rows: np.ndarray, lengths: np.ndarray, count: int
    ) -> tuple[list[SampledTokens], list[list[int]]]:
        """Sample like ``sample``. Also returns the ``count`` most likely tokens of each row, the most likely first."""
        head = self._runner.model.draft_heads[self._number(index)]
        return self._runner.sample_and_rank(states, self._positions(rows, lengths), count, head)

    def copy_slots(self, index: int, copies: SlotCopies) -> None:
        """Copy slots within the KV cache of the head. Does nothing for a head without attention."""
        number = self._number(index)
        if self._runner.model.draft_heads[number].attention:
            layer = self._layer(number)
            self._runner.copy_slots(*copies, layers=slice(layer, layer + 1))

    def _number(self, index: int) -> int:
        return min(index, self.count - 1)

    def _layer(self, number: int) -> int:
        """Index of a head's KV cache: the caches of heads follow those of the model's layers."""
        config = self._runner.model.config
        return sum(map(config.has_kv, range(config.num_layers))) + number

    def _positions(self, rows: np.ndarray, lengths: np.ndarray) -> list[Position]:
        pairs = zip(rows.tolist(), lengths.tolist(), strict=True)
        return [self._batch.row(row).draft_position(length) for row, length in pairs]
