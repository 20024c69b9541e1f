"""A smaller model that drafts what a larger one will say."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..step import Draw, RowUpdates
from .input_batch import InputBatch
from .model_runner import ModelRunner


class DraftModel:
    """Drafts by sampling, as the row itself samples: with its parameters and its random numbers.

    Its keys and values lie in blocks of the same numbers as the larger model's, in a cache of its own. It computes what
    it lacks of a row when it is to draft, be it all of the prompt or a token.

    Args:
        max_tokens: of a forward pass.
    """

    needs_all_states = False

    def __init__(self, runner: ModelRunner, batch: InputBatch, block_size: int, max_tokens: int) -> None:
        self._runner = runner
        self._batch = batch
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._computed = np.zeros(len(batch.rows), np.int64)
        """Leading tokens of each row whose keys and values are in the cache here."""
        self._filled = np.zeros(0, bool)
        """Blocks that hold here what they hold in the model's cache, so that cached prefixes are found."""

    def init_cache(self, blocks: int) -> None:
        self._runner.init_cache(blocks, 0)
        self._filled = np.zeros(blocks, bool)

    def apply(self, updates: RowUpdates) -> None:
        if len(updates.copies):
            self._runner.move_blocks(np.zeros(0), np.zeros(0), updates.copies)
        self._filled[updates.swap_in[1::2]] = False
        self._filled[updates.copies[1::2]] = False
        self._computed[updates.branches[::4]] = 0
        cached = {new.row: new.num_computed // self._block_size for new in updates.new}
        for row, hits in cached.items():
            here = self._filled[self._batch.tables[row, :hits]]
            self._computed[row] = self._block_size * (hits if here.all() else int(here.argmin()))
        for row, first, values in updates.segments(updates.tables):
            self._filled[values[max(cached.get(row, first) - first, 0) :]] = False
        for row, first, _ in updates.segments(updates.tokens):
            self._computed[row] = min(self._computed[row], first)
        for row, parent, _ in updates.forks.reshape(-1, 3).tolist():
            self._computed[row] = self._computed[parent]

    def propose(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in rows]
        budget, drafting = self._max_tokens, list[int]()
        np.minimum.at(self._computed, rows, lengths - 1)  # the last token's hidden state is needed
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            lacking = length - int(self._computed[row])
            if lacking <= budget:
                drafting.append(i)
            elif budget:  # a part of it now, and drafts another time
                self._compute([row], [budget], length, sample=False)
            budget = max(budget - lacking, 0)
        for place in range(int(counts.max(initial=0))):
            drafting = [i for i in drafting if counts[i] > place]
            if not drafting:
                break
            own = rows[drafting]
            ends = lengths[drafting] + place
            draws = self._compute(own, ends - self._computed[own], lengths[drafting], sample=True)
            for i, row, end, draw in zip(drafting, own, ends, draws, strict=True):
                found[i].append(token := draw.token_ids[0])
                self._batch.tokens[row, end] = token
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
        """What was drafted and not accepted is to be computed again."""
        accepted = np.array([len(draws[row].token_ids) - 1 if row in draws else 0 for row in rows.tolist()])
        self._computed[rows] = np.minimum(self._computed[rows], starts + lengths + np.maximum(accepted, 0))

    def _compute(
        self, rows: np.ndarray | list[int], counts: np.ndarray | list[int], known: np.ndarray | int, sample: bool
    ) -> list[Draw]:
        """Compute so many more tokens of each row, and sample the next one.

        Args:
            known: tokens of each that are no drafts.
        """
        rows, counts = np.asarray(rows), np.asarray(counts)
        starts = self._computed[rows]
        hidden = self._runner.forward(self._batch.flatten(rows, starts, counts, np.full(len(rows), int(sample))))
        self._computed[rows] = ends = starts + counts
        full = np.minimum(ends, known) // self._block_size
        for row, first, end in zip(rows, starts // self._block_size, full, strict=True):
            self._filled[self._batch.tables[row, first:end]] = True
        if not sample:
            return []
        own = [self._batch.row(row) for row in rows]
        positions = [row.draft_position(end) for row, end in zip(own, ends.tolist(), strict=True)]
        return self._runner.sample(hidden, positions)
