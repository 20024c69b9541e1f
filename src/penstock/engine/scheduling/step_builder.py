"""From a plan to the message that workers compute from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

import numpy as np

from penstock.core import SamplingParams

from ..sequence.plan import Plan
from ..sequence.sequence import Sequence
from ..step import EMPTY, NewRow, RowUpdates, StepInput


class StepBuilder:
    """Writes down what workers do not know yet: sequences carry how much of them was sent.

    Args:
        slots: of LoRA adapters, by what requests are marked with.
    """

    def __init__(self, slots: Mapping[str, int] | None = None) -> None:
        self._slots = slots or {}
        self._branches: list[int] = []

    def branch(self, row: int, parent: int, position: int, token: int) -> None:
        """A beam goes on from the tokens of another (``RowUpdates.branches``)."""
        self._branches += (row, parent, position, token)

    def updates(self, plan: Plan) -> RowUpdates:
        """What is new in the rows of a plan."""
        new: list[NewRow] = []
        tokens: list[int] = []
        tables: list[int] = []
        forks: list[int] = []
        for sequence, _, _, samples, _ in plan.items:
            if sequence.sent_blocks != len(sequence.blocks):
                if sequence.sent_blocks < 0:
                    new.append(self._new_row(sequence))
                    sequence.sent_blocks, sequence.replaced = 0, None
                _segment(tables, sequence.row, sequence.sent_blocks, sequence.blocks)
                sequence.sent_blocks = len(sequence.blocks)
            if sequence.replaced is not None:
                _segment(tokens, sequence.row, sequence.replaced, sequence.tokens)
                sequence.replaced = None
            if len(samples) > 1:
                for twin in samples[1:]:
                    forks += (twin.row, sequence.row, twin.index)
                    twin.sent_blocks = len(twin.blocks)
        branches, self._branches = self._branches, []
        return RowUpdates(
            _pairs(plan.swap_out),
            _pairs(plan.swap_in),
            _pairs(plan.copies),
            _array(branches),
            new,
            _array(tokens),
            _array(tables),
            _array(forks),
        )

    def step(self, plan: Plan, updates: RowUpdates, masked: bool = False) -> StepInput:
        """The message of a plan, whose drafts are known now."""
        if not plan.items:
            return StepInput(updates, EMPTY, EMPTY, EMPTY, EMPTY.astype(bool))
        sequences, starts, lengths, sampling, drafts = zip(*plan.items, strict=True)
        counts = draft_token_ids = EMPTY
        if any(drafts):
            counts = _array(list(map(len, drafts)))
            draft_token_ids = _array([token for draft in drafts for token in draft])
        rows = [sequence.row for sequence in sequences]
        samples = np.frombuffer(bytes(map(bool, sampling)), bool)
        return StepInput(
            updates, _array(rows), _array(starts), _array(lengths), samples, counts, draft_token_ids, masked
        )

    def _new_row(self, sequence: Sequence) -> NewRow:
        sampling, pooled = sequence.request.sampling, sequence.pooled
        return NewRow(
            row=sequence.row,
            token_ids=np.array(sequence.tokens, np.int32),
            prompt_length=sequence.prompt_length,
            num_computed=sequence.num_computed,
            sampling=sampling,
            stop_token_ids=tuple(sequence.stops),
            seed=sequence.seed,
            index=sequence.index,
            lora_slot=self._slots.get(sequence.request.adapter, -1),
            num_candidates=sequence.num_candidates,
            prompt_logprobs=None if sequence.prompt_logprobs is None else sampling.prompt_logprobs or 0,
            context_logits=sequence.context_logits is not None,
            pooling="" if pooled is None else "mean" if pooled.of_all else "last",
        )


def _segment(segments: list[int], row: int, first: int, values: list[int]) -> None:
    segments += (row, first, len(values) - first)
    segments += values[first:]


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    return _array([block for pair in pairs for block in pair])


def _array(values: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(array("i", values), np.int32) if values else EMPTY  # half the time of numpy's own


def probe_step(row: int, block: int, samples: bool) -> StepInput:
    """A step of one token in a row of its own, to find out whether anything can be computed."""
    sampling = SamplingParams(max_tokens=1, temperature=0)
    new = NewRow(row, np.zeros(1, np.int32), 1, 0, sampling, (), 0, 0)
    updates = RowUpdates(new=[new], tables=_array([row, 0, 1, block]))
    return StepInput(updates, _array([row]), np.zeros(1, np.int32), _array([1]), np.array([samples]))
