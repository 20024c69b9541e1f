"""Plan of a step, which the scheduler makes."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import NamedTuple

from .sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence in a step. The step computes its tokens ``start`` to ``start + length``."""

    sequence: Sequence
    start: int
    length: int
    sampling_sequences: tuple[Sequence, ...]
    """Sequences that sample the token at ``start + length``: empty in the middle of a prompt; otherwise ``sequence``,
    and in a request's first sampling step also its forks."""
    draft: list[int]
    """Draft token ids that follow the computed tokens and are verified in the same step."""
    parents: list[int]
    """Index of each draft token's parent in ``draft``, -1 for the last token before the draft. A tree is in depth-first
    order. Empty for a chain."""
    snapshots: Sequence_[tuple[int, int]] = ()
    """Copies of the recurrent state: number of tokens that it includes, in ascending order, and snapshot."""


class OffloadedBlock(NamedTuple):
    """A cached block that is copied between the KV cache and the host tier."""

    block: int
    """Block of the KV cache."""
    slot: int
    """Slot of the host tier."""
    block_hash: bytes
    """Prefix cache hash of the block."""


class OffloadedState(NamedTuple):
    """A recurrent state that is copied between a snapshot and the host tier."""

    snapshot: int
    slots: list[int]
    """Slots of the host tier, in the order of ``hashes``."""
    block_hash: bytes
    """Prefix cache hash of the block that ends where the state was copied."""
    hashes: list[bytes]
    """Hashes of the slots (``block_hash.state_hashes``)."""


@dataclass(slots=True)
class Plan:
    """Plan of one step. Before the step computes, blocks are moved in this order: stored, swapped out, swapped in,
    copied, loaded."""

    drafting_seconds: float = 0.0
    """Time that the workers took to draft tokens before the step."""
    stores: list[OffloadedBlock] = field(default_factory=list)
    """Copies from the KV cache to the host tier of the prefix cache."""
    loads: list[OffloadedBlock] = field(default_factory=list)
    """Copies from the host tier of the prefix cache to the KV cache."""
    state_stores: list[OffloadedState] = field(default_factory=list)
    """Copies from snapshots to the host tier."""
    state_loads: list[OffloadedState] = field(default_factory=list)
    """Copies from the host tier to snapshots, each before the row of the sequence that starts from it is updated."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to swap out: (device block, host block)."""
    state_swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Recurrent states to swap out: (row, slot of the swap space)."""
    swapped: list[Sequence] = field(default_factory=list)
    """Sequences that are swapped out."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to swap in: (host block, device block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Copies on write: (source, target) device blocks."""
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    """Sequences of the step."""
    encoder_tokens: int = 0
    """Number of image patches and audio positions to encode before the step; they prolong the step."""

    @property
    def tokens(self) -> int:
        """Number of tokens to compute, drafts included."""
        return sum(item.length + len(item.draft) for item in self.scheduled)

    def __bool__(self) -> bool:
        """True if the workers have to compute or copy something."""
        return bool(self.scheduled or self.swapped or self.stores or self.state_stores)
