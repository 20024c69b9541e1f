"""From a plan to the flat batch that a model computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.ops import AttentionMetadata, Batch

from ..scheduling.plan import Item, Plan
from ..scheduling.sequence import Sequence


class Flattener:
    """Lays plans out flat. The block numbers of running sequences stay here from step to step.

    Args:
        rows: sequences that may run at the same time.
        longest: tokens a sequence may have.
        whole: whether hidden states of all tokens are wanted, and not only where something is made of them.
        slots: of adapters; None where there are none.
    """

    def __init__(
        self,
        rows: int,
        longest: int,
        block_size: int,
        device: torch.device,
        whole: bool = False,
        slots: Mapping[str, int] | None = None,
    ) -> None:
        self._whole = whole
        self._slots = slots
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((rows, -(-longest // block_size)), np.int32)
        self._laid: list[list[int] | None] = [None] * rows

    def __call__(self, plan: Plan) -> Batch:
        """The batch of a plan with at least one item."""
        token_ids: list[int] = []
        numbers: list[tuple[int, int, int, int]] = []
        for item in plan.items:
            sequence, start = item.sequence, item.start
            self._place(sequence, start)
            token_ids += sequence.tokens[start : start + item.length] + item.draft
            numbers.append((sequence.row, start, item.length + len(item.draft), self.rows_of(item)))
        rows, starts, lengths, wanted = np.array(numbers).T
        total, ends = starts + lengths, lengths.cumsum()
        positions = np.arange(ends[-1]) + (total - ends).repeat(lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        most_blocks = -(-int(total.max()) // self._block_size)
        slots = self._tables[rows.repeat(lengths), blocks].astype(np.int64) * self._block_size + offsets
        queries = logit_queries = self._queries(rows, total, lengths, most_blocks)
        if not (wanted == lengths).all():
            some = wanted > 0
            logit_queries = self._queries(rows[some], total[some], wanted[some], most_blocks)
        drawn = wanted.cumsum()
        adapters = logit_adapters = None
        if self._slots and any([item.sequence.request.adapter for item in plan.items]):
            own = np.array([self._slots[item.sequence.request.adapter] for item in plan.items], np.int32)
            adapters, logit_adapters = (self._tensor(own.repeat(counts)) for counts in (lengths, wanted))
        return Batch(
            token_ids=self._tensor(np.array(token_ids)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            attention=queries,
            logits_indices=self._tensor(np.arange(drawn[-1]) + (ends - drawn).repeat(wanted)),
            logits_attention=logit_queries,
            lora_slots=adapters,
            logits_lora_slots=logit_adapters,
        )

    def rows_of(self, item: Item) -> int:
        """Of how many of an item's tokens, its last ones, there will be hidden states."""
        return item.length + len(item.draft) if self._whole else scores_wanted(item)

    def _queries(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray, blocks: int) -> AttentionMetadata:
        """Of each row so many of its last tokens."""
        starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=starts[1:])
        tables = self._tables[rows, :blocks]
        return AttentionMetadata(self._tensor(starts), self._tensor(lengths.astype(np.int32)), self._tensor(tables))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

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


def context_wanted(item: Item) -> int:
    """Of how many of an item's tokens, its first ones, the scores are to be told, as they are the prompt's."""
    sequence = item.sequence
    return 0 if sequence.context_logits is None else max(0, min(item.length, sequence.prompt_length - item.start))


def scores_wanted(item: Item) -> int:
    """Of how many of an item's tokens, its last ones: all where its prompt is to be told or its mean to be taken, else
    one where it is due a draw or a vector, and one for each guess."""
    pooled = item.sequence.pooled
    if prompt_tokens(item) or context_wanted(item) or (pooled and pooled.of_all):
        return item.length
    ends = item.start + item.length == item.sequence.prompt_length
    return ends if pooled else bool(item.samples) + len(item.draft)
