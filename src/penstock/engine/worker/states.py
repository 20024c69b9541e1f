"""Recurrent states of the worker's rows, and snapshots of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.state_spec import StateSpec, bytes_per_slot
from penstock.layers import new_state_cache
from penstock.ops import StateBatch

from ..step import NewRow, RowUpdates, StepInput


class RowStates:
    """States of rows and snapshots. The slot of a row is its number; the slots of snapshots follow.

    Args:
        specs: state of each recurrent layer of this pipeline stage.
        rows: number of rows.
        max_drafts: maximum number of draft tokens of a row.
    """

    def __init__(self, specs: Sequence[StateSpec], rows: int, max_drafts: int, device: torch.device) -> None:
        self._specs = specs
        self.rows = rows
        """Number of rows."""
        self._max_drafts = max_drafts
        self._device = device
        self.cache: list[dict[str, Tensor]] = []
        """``StateBatch.cache``: the same list before and after ``allocate``."""
        self._lengths = np.zeros(rows, np.int64)
        """Number of tokens that each row's state includes."""
        self._swapped: list[dict[str, Tensor]] = []
        """States of swapped sequences in host memory, with inputs of drafts: as ``cache``, by slot."""
        self._swapped_lengths = np.zeros(0, np.int64)
        """Number of tokens that each of them includes."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states, without inputs of drafts."""
        return bytes_per_slot(self._specs)

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of all rows, with inputs of drafts."""
        return self.rows * bytes_per_slot(self._specs, self._max_drafts)

    def allocate(self, snapshots: int, swapped: int = 0) -> None:
        """Allocate the states of rows, ``snapshots``, and the states of ``swapped`` sequences."""
        slots = self.rows + snapshots
        self.cache[:] = new_state_cache(self._specs, slots, self.rows, self._max_drafts, self._device)
        host = torch.device("cpu")
        self._swapped = new_state_cache(self._specs, swapped, swapped, self._max_drafts, host)
        self._swapped_lengths = np.zeros(swapped, np.int64)

    def free(self) -> None:
        self.cache.clear()
        self._swapped.clear()

    def swap_out(self, pairs: np.ndarray) -> None:
        """Copy the states of rows to host memory (``RowUpdates.state_swap_out``)."""
        for row, slot in pairs.reshape(-1, 2).tolist():
            for parts, swapped in zip(self.cache, self._swapped, strict=True):
                for name, part in parts.items():
                    swapped[name][slot] = part[row]
            self._swapped_lengths[slot] = self._lengths[row]

    def _swap_in(self, slot: int, row: int) -> None:
        """Copy a state from host memory to a row."""
        for parts, swapped in zip(self.cache, self._swapped, strict=True):
            for name, part in parts.items():
                part[row] = swapped[name][slot]
        self._lengths[row] = self._swapped_lengths[slot]

    def begin(self, updates: RowUpdates, load: Callable[[NewRow], None]) -> None:
        """Apply the updates that precede a step: beams that continue others, and rows that start.

        Args:
            load: loads the snapshot of a row with ``state_slots``. It is called just before the snapshot is copied,
                since the rows before it may start from the state that it overwrites.
        """
        if len(updates.beam_steps):
            steps = updates.beam_steps.reshape(-1, 4)
            self._copy(steps[:, 1], steps[:, 0])
        for new in updates.new:
            if new.swapped_state >= 0:
                self._swap_in(new.swapped_state, new.row)
                continue
            self._lengths[new.row] = new.num_computed
            if new.state_slots:
                load(new)
            for part in self._states():
                part[new.row] = part[self.rows + new.snapshot] if new.snapshot >= 0 else 0

    def fork(self, updates: RowUpdates) -> None:
        """Copy the states of rows that a step has forked, after the step."""
        if len(updates.forks):
            forks = updates.forks.reshape(-1, 3)
            self._copy(forks[:, 1], forks[:, 0])

    def batch(self, step: StepInput) -> StateBatch:
        """States of a step's sequences. Call this once for each step: it counts the step's tokens as applied."""
        rows, count = step.rows, len(step.rows)
        accepted = step.starts - self._lengths[rows]
        assert (accepted >= 0).all() and (accepted <= self._max_drafts).all(), "a row's state is ahead of its tokens"
        self._lengths[rows] = step.starts + step.lengths
        drafts = step.drafts if len(step.drafts) else np.zeros(count, np.int32)
        saves = step.snapshots.reshape(-1, 3)
        starts = np.searchsorted(saves[:, 0], np.arange(count + 1))

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int32))

        return StateBatch(
            self.cache,
            tensor(rows),
            tensor(accepted),
            tensor(drafts),
            tensor(starts),
            tensor(saves[:, 1]),
            tensor(saves[:, 2] + self.rows),
        )

    def read(self, snapshot: int, memory: Tensor, slots: Sequence[int]) -> None:
        """Copy a snapshot to host memory: the bytes of all parts of the states, one after another.

        Args:
            memory: ``[slots, slot_bytes]`` uint8.
            slots: slots of ``memory`` to fill, in this order. What is left of the last is not written.
        """
        for index, slot in enumerate(slots):
            for part, piece in self._pieces(snapshot, index * memory.shape[1], memory.shape[1]):
                memory[slot, piece] = part.cpu()

    def write(self, snapshot: int, memory: Tensor, slots: Sequence[int], first: int = 0) -> None:
        """Copy ``slots``, as filled by ``read``, to a snapshot.

        Args:
            first: index of the first of these slots among those that ``read`` filled.
        """
        for index, slot in enumerate(slots, first):
            for part, piece in self._pieces(snapshot, index * memory.shape[1], memory.shape[1]):
                part.copy_(memory[slot, piece])

    def _pieces(self, snapshot: int, offset: int, size: int) -> Iterator[tuple[Tensor, slice]]:
        """Memory of bytes ``offset`` to ``offset + size`` of a snapshot, part by part, and their range from
        ``offset``."""
        start = 0
        for part in self._states():
            memory = part[self.rows + snapshot].flatten().view(torch.uint8)
            first, end = max(start, offset), min(start + len(memory), offset + size)
            if first < end:
                yield memory[first - start : end - start], slice(first - offset, end - offset)
            start += len(memory)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy the states of rows to other rows, all at once."""
        old, new = (torch.from_numpy(rows.astype(np.int64)) for rows in (sources, targets))
        for part in self._states():
            part[new] = part[old]
        self._lengths[targets] = self._lengths[sources]

    def _states(self) -> list[Tensor]:
        return [cache[name] for cache, spec in zip(self.cache, self._specs, strict=True) for name in spec.state]
