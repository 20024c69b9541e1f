"""Swap space: host memory that holds the KV blocks and recurrent states of preempted sequences."""

from __future__ import annotations

from typing import NamedTuple

from ..sequence.sequence import Sequence
from .block_pool import BlockPool


class SwapOut(NamedTuple):
    """Copies of a sequence that is swapped out."""

    blocks: list[tuple[int, int]]
    """Device block and host block of each KV block."""
    states: list[tuple[int, int]]
    """Row, and slot of the swap space; empty for models without recurrent states."""


class SwapSpace:
    """Allocates host blocks, and slots for recurrent states.

    Args:
        num_blocks: number of host blocks.
        num_states: number of slots; None for models without recurrent states.
    """

    def __init__(self, num_blocks: int, block_size: int, num_states: int | None = None) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self._num_states = num_states
        self._free_states = list(range(num_states or 0))

    @property
    def num_blocks(self) -> int:
        """Number of host blocks."""
        return self._pool.total

    @property
    def is_free(self) -> bool:
        """True if no sequence is swapped."""
        return self._pool.num_free == self._pool.total and len(self._free_states) == (self._num_states or 0)

    def swap_out(self, sequence: Sequence) -> SwapOut | None:
        """Allocate space for a sequence that still has its row. None if there is too little."""
        blocks = sequence.blocks
        if len(blocks) > self._pool.num_free or (self._num_states is not None and not self._free_states):
            return None
        sequence.host_blocks = self._pool.allocate(len(blocks))
        if self._num_states is not None:
            sequence.host_state = self._free_states.pop()
        states = [(sequence.row, sequence.host_state)] if sequence.host_state >= 0 else []
        return SwapOut(list(zip(blocks, sequence.host_blocks, strict=True)), states)

    def swap_in(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Free the space of a sequence whose device blocks are allocated. The same step has to copy its state from the
        slot ``Sequence.swapped_state``, and the returned blocks (host block, device block)."""
        copies = list(zip(sequence.host_blocks, sequence.blocks, strict=False))
        sequence.swapped_state = sequence.host_state
        self.release(sequence)
        return copies

    def release(self, sequence: Sequence) -> None:
        """Free the space of a sequence; ignored if it is not swapped."""
        self._pool.release(sequence.host_blocks)
        sequence.host_blocks = []
        if sequence.host_state >= 0:
            self._free_states.append(sequence.host_state)
            sequence.host_state = -1
