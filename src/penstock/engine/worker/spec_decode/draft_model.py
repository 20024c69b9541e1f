"""Drafting with a draft model: a smaller model with the same vocabulary."""

from __future__ import annotations

import numpy as np

from ...step import RowUpdates, SampledTokens
from ..input_batch import InputBatch
from ..model_runner import ModelRunner
from .drafter import DraftBuilder, VerifiedStep


class DraftModel:
    """Drafts by sampling from a smaller model, with the sampling parameters and random numbers of each row.

    The draft model has a separate KV cache. A sequence uses the same block numbers in it as in the model's KV cache.
    ``propose`` computes all tokens whose keys and values are missing in this cache: a whole prompt or a single token.

    Args:
        runner: runner of the draft model.
        batch: the worker's rows.
        block_size: number of tokens per KV block.
        max_tokens: maximum number of tokens per forward pass.
    """

    needs_all_hidden_states = False

    def __init__(self, runner: ModelRunner, batch: InputBatch, block_size: int, max_tokens: int) -> None:
        self._runner = runner
        self._batch = batch
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._computed = np.zeros(len(batch.rows), np.int64)
        """Number of leading tokens of each row with keys and values in this cache, ``[rows]``."""
        self._filled = np.zeros(0, bool)
        """True for each block with the same tokens as in the model's cache, ``[blocks]``. A row that reuses a block of
        the prefix cache also reuses its keys and values in this cache."""

    def init_cache(self, blocks: int) -> None:
        self._runner.init_cache(blocks, 0)
        self._filled = np.zeros(blocks, bool)

    def apply(self, updates: RowUpdates) -> None:
        if len(updates.copies):
            self._runner.move_blocks(np.zeros(0), np.zeros(0), updates.copies)
        self._filled[updates.swap_in[1::2]] = False
        self._filled[updates.loads[1::2]] = False
        self._filled[updates.copies[1::2]] = False
        self._computed[updates.beam_steps[::4]] = 0
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

    def propose(
        self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray, trees: np.ndarray
    ) -> list[list[int] | None]:
        drafts = DraftBuilder(len(rows))
        budget, drafting = self._max_tokens, list[int]()
        np.minimum.at(self._computed, rows, lengths - 1)  # recompute the last token: drafting needs its hidden state
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            missing = length - int(self._computed[row])
            if missing <= budget:
                drafting.append(i)
            elif budget:  # compute as many tokens as possible now; a later call drafts
                self._compute([row], [budget], length, sample=False)
            budget = max(budget - missing, 0)
        for index in range(int(counts.max(initial=0))):
            drafting = [i for i in drafting if counts[i] > index]
            if not drafting:
                break
            chosen = rows[drafting]
            ends = lengths[drafting] + index
            sampled = self._compute(chosen, ends - self._computed[chosen], lengths[drafting], sample=True)
            continuing = list[int]()
            for i, row, end, result in zip(drafting, chosen, ends, sampled, strict=True):
                if (token := drafts.add(i, result)) is not None:
                    self._batch.tokens[row, end] = token
                    continuing.append(i)
            drafting = continuing
        return drafts.token_ids

    def after_step(self, step: VerifiedStep) -> None:
        """Discard the keys and values of draft tokens that were not accepted."""
        rows, sampled = step.rows, step.sampled
        accepted = np.array([len(sampled[row].token_ids) - 1 if row in sampled else 0 for row in rows.tolist()])
        ends = step.starts + step.lengths + np.maximum(accepted, 0)
        self._computed[rows] = np.minimum(self._computed[rows], ends)

    def reset(self) -> None:
        self._computed[:] = 0
        self._filled[:] = False

    def _compute(
        self, rows: np.ndarray | list[int], counts: np.ndarray | list[int], known: np.ndarray | int, sample: bool
    ) -> list[SampledTokens]:
        """Compute the next ``counts`` tokens of each row that are missing in the cache.

        Args:
            known: length of each row without draft tokens.
            sample: sample and return the token after the computed tokens of each row; False: return an empty list.
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
        positions = [self._batch.row(row).draft_position(end) for row, end in zip(rows, ends.tolist(), strict=True)]
        return self._runner.sample(hidden, positions).result()
