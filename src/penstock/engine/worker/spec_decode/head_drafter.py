"""Drafting with heads that read the model's hidden states: MTP layers, EAGLE and Medusa."""

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
"""Maximum number of pending tokens of a row. The next draft reads all of them with one call of the first head; while no
draft is requested, the head is called once in ``MAX_PENDING`` steps."""


class Pending(NamedTuple):
    """The newest tokens of a row, which the first head has not read yet."""

    start: int
    """Position of the first pending token."""
    states: Tensor
    """Hidden states of the model at these tokens, ``[tokens, hidden]``."""

    @property
    def end(self) -> int:
        return self.start + len(self.states)


class HeadDrafter:
    """Drafts with the model's ``draft_heads``.

    The model's KV cache includes layers for the heads' keys and values. The heads' keys and values are missing for the
    last tokens of a cached prefix, and for prefixes loaded from a lower tier. This only lowers acceptance.

    Args:
        runner: runner of the model.
        batch: the worker's rows.
        tree: shape of token trees; None: draft chains.
        memory: rows and blocks for the paths of trees.
    """

    def __init__(self, runner: ModelRunner, batch: InputBatch, tree: TokenTree | None, memory: TreeMemory) -> None:
        self._heads = HeadRunner(runner, batch)
        self._batch = batch
        self._trees = TreeDrafter(self._heads, tree, memory) if tree else None
        self.needs_all_hidden_states = not runner.model.aux_hidden_state_layers
        self._pending: dict[int, Pending] = {}
        """Row number → pending tokens."""

    def init_cache(self, blocks: int) -> None:
        """Do nothing: the model's KV cache includes the layers of the heads."""

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
            items = np.array(drafting)[chosen]
            proposed = self._trees.propose(rows[items], lengths[items], counts[items], states[chosen])
            for i, tree in zip(items.tolist(), proposed, strict=True):
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
        """Draft token sequences without branches, one token after the other, and add them to ``drafts``.

        Args:
            drafting: indices of the rows to draft for.
            states: hidden states of the first head, ``[drafting, hidden]``.
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
        """Keep the hidden states of the step's tokens for the next draft. If a row has more than ``MAX_PENDING``
        pending tokens, the first head reads them now."""
        items: list[tuple[int, int, int]] = []
        states: list[int] = []
        end = 0
        columns = (step.rows, step.starts, step.lengths, step.drafts)
        for row, start, length, drafted in zip(*(column.tolist() for column in columns), strict=True):
            begin, end = end, end + length + drafted
            for number in (row, *step.forks.get(row, ())):
                result = step.sampled.get(number)
                if self._batch.row(number).num_candidates or (result and result.failure):
                    continue
                count = length + (len(result.token_ids) - 1 if result else 0)
                first = 0 if number == row else count - 1  # forked rows share the blocks of all tokens but the last
                items.append((number, start + first, count - first))
                if number in step.accepted:
                    computed = [*range(length), *(length + node for node in step.accepted[number])]
                    states += [begin + i for i in computed[first:count]]
                else:
                    states += range(begin + first, begin + count)
        if not items:
            return
        by_item = step.hidden[states].split([count for _, _, count in items])
        for (row, start, _), new in zip(items, by_item, strict=True):
            before = self._pending.get(row)
            if before and before.end == start:
                start, new = before.start, torch.cat((before.states, new))
            self._pending[row] = Pending(start, new)
        if full := [row for row, _, _ in items if len(self._pending[row].states) > MAX_PENDING]:
            self._read_all_but_last(full)

    def reset(self) -> None:
        self._pending.clear()

    def _read_pending(self, rows: list[int]) -> Tensor:
        """Read the pending tokens of rows with the first head. Each row must have pending tokens. Returns the head's
        hidden state at the last token of each row, ``[rows, hidden]``."""
        pending = [self._pending.pop(row) for row in rows]
        combined = self._heads.combine_hidden_states(torch.cat([each.states for each in pending]))
        starts, counts = np.array([(each.start, len(each.states)) for each in pending]).T
        return self._heads.forward(0, np.array(rows), starts, counts, combined)

    def _read_all_but_last(self, rows: list[int]) -> None:
        """Read the pending tokens of rows with the first head, except the newest: the next draft starts from it."""
        newest = dict[int, Pending]()
        for row in rows:
            start, states = self._pending[row]
            newest[row] = Pending(start + len(states) - 1, states[-1:].clone())
            self._pending[row] = Pending(start, states[:-1])
        self._read_pending(rows)
        self._pending |= newest
