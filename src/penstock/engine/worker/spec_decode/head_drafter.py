"""Draft heads: what drafts the tokens after the next one from the model's hidden states, as MTP layers do, and heads of
EAGLE and Medusa."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.config.token_tree import TokenTree

from ...step import RowUpdates
from ..input_batch import InputBatch
from ..model_runner import ModelRunner
from .drafter import DraftBuilder, VerifiedStep
from .head_runner import HeadRunner
from .tree_drafter import TreeDrafter
from .tree_rows import TreeMemory

MAX_PENDING = 16
"""Tokens of a row that wait for the next draft, which reads them with one call. While there are no drafts, a head costs
one call in so many steps."""


class Pending(NamedTuple):
    """A row's newest tokens, which the first head has not read yet."""

    start: int
    """Position of the first one."""
    states: Tensor
    """``[tokens, hidden]``: the model's hidden states."""

    @property
    def end(self) -> int:
        return self.start + len(self.states)


class HeadDrafter:
    """Drafts with the model's ``draft_heads``, which read its hidden states.

    Heads have keys and values of their own in the model's KV cache. They are missing for the last tokens of a cached
    prefix, and in one that comes from a lower tier, which only lowers acceptance.

    Args:
        runner: of the model.
        batch: the worker's rows.
        tree: shape of trees of draft tokens; None where drafts are chains.
        memory: for the paths of trees.
    """

    def __init__(self, runner: ModelRunner, batch: InputBatch, tree: TokenTree | None, memory: TreeMemory) -> None:
        self._heads = HeadRunner(runner, batch)
        self._batch = batch
        self._trees = TreeDrafter(self._heads, tree, memory) if tree else None
        self.needs_all_hidden_states = not runner.model.aux_hidden_state_layers
        self._pending: dict[int, Pending] = {}
        """By row number."""

    def init_cache(self, blocks: int) -> None:
        """Nothing to do: the heads' cache is part of the model's."""

    def apply(self, updates: RowUpdates) -> None:
        for new in updates.new:
            self._pending.pop(new.row, None)
        for row in updates.forks[::3].tolist():
            self._pending.pop(row, None)

    def propose(
        self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray, trees: np.ndarray
    ) -> list[list[int] | None]:
        drafts = DraftBuilder(len(rows))
        drafting = [
            i
            for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True))
            if row in self._pending and self._pending[row].end == length - 1 and counts[i]
        ]
        if not drafting:
            return drafts.token_ids
        states = self._read_pending(rows[drafting].tolist())
        if self._trees and len(trees) and (chosen := np.flatnonzero(trees[drafting])).size:
            own = np.array(drafting)[chosen]
            for i, tree in zip(
                own.tolist(), self._trees.propose(rows[own], lengths[own], counts[own], states[chosen]), strict=True
            ):
                drafts.token_ids[i] = tree
            chains = np.flatnonzero(trees[drafting] == 0)
            states, drafting = states[chains], [drafting[at] for at in chains.tolist()]
        self._draft_chains(drafts, drafting, states, rows, lengths, counts)
        return drafts.token_ids

    def _draft_chains(
        self,
        drafts: DraftBuilder,
        drafting: list[int],
        states: Tensor,
        rows: np.ndarray,
        lengths: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Draft one token after the other.

        Args:
            drafting: indices of the rows.
            states: ``[drafting, hidden]``, of the first head.
        """
        longest = int(counts[drafting].max(initial=0))
        for place in range(longest if self._heads.recurrent else min(longest, self._heads.count)):
            if place:
                starts = lengths[drafting] + place - 2
                states = self._heads.forward(place, rows[drafting], starts, np.ones_like(starts), states)
            going = list[int]()
            for at, (i, result) in enumerate(
                zip(
                    drafting,
                    self._heads.sample(place, states, rows[drafting], lengths[drafting] + place),
                    strict=True,
                )
            ):
                if (token := drafts.add(i, result)) is not None:
                    self._batch.tokens[rows[i], lengths[i] + place] = token
                    if counts[i] > place + 1:
                        going.append(at)
            if not going:
                break
            if len(going) < len(drafting):
                states, drafting = states[going], [drafting[at] for at in going]

    def after_step(self, step: VerifiedStep) -> None:
        """Keep the hidden states of the step's tokens for the next draft, and have the first head read those of rows
        that have too many."""
        items: list[tuple[int, int, int]] = []
        states: list[int] = []
        end = 0
        columns = (step.rows, step.starts, step.lengths, step.drafts)
        for row, start, length, drafted in zip(*(column.tolist() for column in columns), strict=True):
            begin, end = end, end + length + drafted
            for own in (row, *step.forks.get(row, ())):
                result = step.sampled.get(own)
                if self._batch.row(own).num_candidates or (result and result.failure):
                    continue
                count = length + (len(result.token_ids) - 1 if result else 0)
                first = 0 if own == row else count - 1  # forked rows share the blocks of all tokens but the last
                items.append((own, start + first, count - first))
                if own in step.accepted:
                    computed = [*range(length), *(length + node for node in step.accepted[own])]
                    states += [begin + i for i in computed[first:count]]
                else:
                    states += range(begin + first, begin + count)
        if not items:
            return
        own_states = step.hidden[states].split([count for _, _, count in items])
        for (row, start, _), new in zip(items, own_states, strict=True):
            before = self._pending.get(row)
            if before and before.end == start:
                start, new = before.start, torch.cat((before.states, new))
            self._pending[row] = Pending(start, new)
        if full := [row for row, _, _ in items if len(self._pending[row].states) > MAX_PENDING]:
            self._read_all_but_last(full)

    def reset(self) -> None:
        self._pending.clear()

    def _read_pending(self, rows: list[int]) -> Tensor:
        """Have the first head read the pending tokens of rows, which must have some. Returns its hidden state at each
        row's last one, ``[rows, hidden]``."""
        pending = [self._pending.pop(row) for row in rows]
        combined = self._heads.combine_hidden_states(torch.cat([each.states for each in pending]))
        starts, counts = np.array([(each.start, len(each.states)) for each in pending]).T
        return self._heads.forward(0, np.array(rows), starts, counts, combined)

    def _read_all_but_last(self, rows: list[int]) -> None:
        """Have the first head read the pending tokens of rows but for the newest, which a draft begins with."""
        newest = dict[int, Pending]()
        for row in rows:
            start, states = self._pending[row]
            newest[row] = Pending(start + len(states) - 1, states[-1:].clone())
            self._pending[row] = Pending(start, states[:-1])
        self._read_pending(rows)
        self._pending |= newest
