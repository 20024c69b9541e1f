"""The worker's rows: tokens and block tables of running sequences, from which the input of each step is built."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.ops import AttentionMetadata, Batch

from ..step import RowUpdates
from .logits_processors import adjusts_logits
from .row import Row


class InputBatch:
    """The rows of a worker.

    Args:
        rows: number of rows: one for each running sequence, and the targets of ``copy_row``.
        max_len: maximum number of tokens per sequence.
        block_size: number of tokens per KV block.
    """

    def __init__(self, rows: int, max_len: int, block_size: int) -> None:
        self._block_size = block_size
        self.tokens = np.zeros((rows, max_len + 1), np.int32)
        """Token ids, ``[rows, max_len + 1]``. The last column holds the token sampled after ``max_len`` tokens, which
        no step computes."""
        self.tables = np.zeros((rows, -(-max_len // block_size)), np.int32)
        """Block tables: numbers of the KV blocks of each row in token order, ``[rows, blocks]``."""
        self.rows: list[Row | None] = [None] * rows
        """State of each row, by row number; None before the row's first sequence."""
        self.lora_slots = np.full(rows, -1, np.int32)
        """Slot of each row's adapter, ``[rows]``; -1: no adapter."""
        self._any_lora = False
        self.mrope_deltas = np.zeros(rows, np.int64)
        """Offset from the index of a token after the prompt to its M-RoPE position, ``[rows]``."""
        self._max_len = max_len
        self._second_texts = np.zeros(rows, np.int64)
        """Index of the first token of the second text of each row (``NewRow.second_text``), ``[rows]``."""
        self._any_second_text = False
        self.prompt_outputs = np.zeros(rows, bool)
        """True for each row with outputs for the prompt (``Row.has_prompt_outputs``), ``[rows]``."""
        self.any_prompt_outputs = False
        self._in_flight = np.full((2, rows), -1, np.int64)
        """Token that the device is still sampling for each row, ``[2, rows]``: its position in the row, and its index
        among the sampled tokens of the step (see ``Batch.token_ids``); -1: no such token."""
        self._any_in_flight = False

    def row(self, number: int) -> Row:
        """The row with this number. The row must have a sequence."""
        row = self.rows[number]
        assert row is not None, "the step refers to a row without a sequence"
        return row

    def apply(self, updates: RowUpdates) -> None:
        """Apply updates to rows. Does not copy KV blocks: ``ModelRunner.move_blocks`` does."""
        if len(updates.beam_steps):
            self._reorder_beams(updates.beam_steps.reshape(-1, 4))
        for new in updates.new:
            tokens = self.tokens[new.row]
            tokens[: len(new.token_ids)] = new.token_ids
            self.rows[new.row] = row = Row(new, tokens, adjusts_logits(new.sampling))
            self.prompt_outputs[new.row] = row.has_prompt_outputs
            self.lora_slots[new.row] = new.lora_slot
            self._second_texts[new.row] = new.second_text
            given = new.mrope_positions
            self.mrope_deltas[new.row] = given.max() + 1 - given.shape[1] if given.size else 0
        if updates.new:
            self._any_lora = bool((self.lora_slots >= 0).any())
            self.any_prompt_outputs = bool(self.prompt_outputs.any())
            self._any_second_text = bool(self._second_texts.any())
        for number, first, values in updates.segments(updates.tokens):
            self.tokens[number, first : first + len(values)] = values
            if counts := self.row(number).counts:
                counts.rewind(first)
        for number, first, values in updates.segments(updates.tables):
            self.tables[number, first : first + len(values)] = values
        for child, parent, index in updates.forks.reshape(-1, 3).tolist():
            self.tokens[child], self.tables[child] = self.tokens[parent], self.tables[parent]
            self.lora_slots[child], self.prompt_outputs[child] = self.lora_slots[parent], False
            self.mrope_deltas[child] = self.mrope_deltas[parent]
            self.rows[child] = self.row(parent).fork(index, self.tokens[child])

    def copy_row(self, row: int, source: int) -> None:
        """Make ``row`` a copy of row ``source`` with the same KV blocks. Used for paths of token trees; the engine does
        not know these rows."""
        self.tables[row], self.lora_slots[row] = self.tables[source], self.lora_slots[source]
        self.mrope_deltas[row], self.rows[row] = self.mrope_deltas[source], self.rows[source]

    def set_in_flight(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Record that the device is sampling tokens at ``positions`` of ``rows``, in sampling order. Replaces the
        record of the previous step."""
        self._in_flight[:] = -1
        self._in_flight[0, rows] = positions
        self._in_flight[1, rows] = np.arange(len(rows))
        self._any_in_flight = len(rows) > 0

    def clear_in_flight(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Record that the sampled tokens at ``positions`` of ``rows`` are now written to ``tokens``."""
        known = np.asarray(rows)[self._in_flight[0, rows] == positions]
        self._in_flight[:, known] = -1
        self._any_in_flight = bool((self._in_flight[0] >= 0).any())

    def needs_token_values(self, number: int) -> bool:
        """True if sampling for a row needs its previous tokens on the host (``Row.needs_token_values``)."""
        row = self.rows[number]
        return row is not None and row.needs_token_values

    def flatten(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        num_states: np.ndarray,
        shift: int = 0,
        first_states: np.ndarray | None = None,
    ) -> Batch:
        """Build the input of a forward pass, in host memory: the tokens of all items, concatenated without padding. An
        item consists of ``lengths`` tokens of a row, from position ``starts`` on. At least one token is required.

        Args:
            rows, starts, lengths: the items, ``[items]`` int32 or int64.
            num_states: number of trailing hidden states to return for each item, ``[items]`` int64.
            shift: offset from a position to the token computed there: 0, or 1 for draft heads.
            first_states: True for each item that returns its leading hidden states instead of the trailing ones,
                ``[items]`` bool; None: False for all items.
        """
        ends = lengths.cumsum()
        total = starts + lengths
        count = int(ends[-1])
        if count == len(rows):  # pure decode: each item has one token
            token_rows, positions = rows, starts.astype(np.int64)
        else:
            token_rows = rows.repeat(lengths)
            positions = np.arange(count) + (total - ends).repeat(lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        max_blocks = -(-int(total.max()) // self._block_size)
        slot_mapping = self.tables[token_rows, blocks].astype(np.int64) * self._block_size + offsets
        attention = logits_attention = self._attention_metadata(rows, total, lengths, max_blocks)
        if (num_states == lengths).all():
            logits_indices = np.arange(count)
        else:
            some, ends_of_states, seen = num_states > 0, ends, total
            if first_states is not None:  # for leading hidden states, an item ends after the last state to return
                ends_of_states = np.where(first_states, ends - lengths + num_states, ends)
                seen = np.where(first_states, starts + num_states, total)
            logits_attention = self._attention_metadata(rows[some], seen[some], num_states[some], max_blocks)
            state_ends = num_states.cumsum()
            logits_indices = np.arange(state_ends[-1]) + (ends_of_states - state_ends).repeat(num_states)
        lora_slots = logits_lora_slots = None
        if self._any_lora and ((slot := self.lora_slots[rows]) >= 0).any():
            lora_slots = logits_lora_slots = torch.from_numpy(slot.repeat(lengths))
            if logits_attention is not attention:
                logits_lora_slots = torch.from_numpy(slot.repeat(num_states))
        token_ids = self.tokens[token_rows, positions + shift].astype(np.int64)
        if self._any_in_flight:
            is_in_flight = self._in_flight[0, token_rows] == positions + shift
            token_ids[is_in_flight] = -1 - self._in_flight[1, token_rows[is_in_flight]]
        if self._any_second_text:  # the second text has a separate table of learned positions
            second = self._second_texts[token_rows]
            positions = positions + self._max_len * ((second > 0) & (positions >= second))
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            attention=attention,
            logits_indices=torch.from_numpy(logits_indices),
            logits_attention=logits_attention,
            lora_slots=lora_slots,
            logits_lora_slots=logits_lora_slots,
        )

    def _attention_metadata(
        self, rows: np.ndarray, total: np.ndarray, counts: np.ndarray, blocks: int
    ) -> AttentionMetadata:
        starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=starts[1:])
        tables = self.tables[rows, :blocks]
        return AttentionMetadata(
            torch.from_numpy(starts), torch.from_numpy(total.astype(np.int32)), torch.from_numpy(tables)
        )

    def _reorder_beams(self, beam_steps: np.ndarray) -> None:
        rows, parents, positions, token_ids = beam_steps.T
        length = int(positions.max()) + 1
        blocks = -(-length // self._block_size)
        self.tokens[rows, :length], self.tables[rows, :blocks] = (
            self.tokens[parents, :length],
            self.tables[parents, :blocks],
        )
        self.tokens[rows, positions] = token_ids
        counts = [self.row(parent).counts for parent in parents]
        for row, known in zip(rows, counts, strict=True):
            self.row(row).counts = known and known.copy()
