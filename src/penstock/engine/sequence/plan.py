"""Plan of a step, as decided by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence in a step. The step computes its tokens ``start`` to ``start + length``."""

    sequence: Sequence
    start: int
    length: int
    sampling_sequences: tuple[Sequence, ...]
    """Sequences that sample the token at ``start + length``: none in the middle of a prompt; otherwise ``sequence``,
    and in a request's first sampling step also those forked from it."""
    draft: list[int]
    """Draft token ids that follow these tokens and are verified in the same step."""
    parents: list[int]
    """Index of each draft token's parent in ``draft``, -1 for the last token before the draft. A tree is in depth-first
    order. Empty for a chain."""


class OffloadedBlock(NamedTuple):
    """A cached block that is copied between the KV cache and the host tier."""

    block: int
    """Block of the KV cache."""
    slot: int
    """Slot of the host tier."""
    block_hash: bytes


@dataclass(slots=True)
class Plan:
    """Plan of one step. Blocks are moved before anything is computed, in this order: stored, swapped out, swapped in,
    copied, loaded."""

    num_running: int = 0
    """Number of running sequences when the step was planned."""
    drafting: bool = False
    """True if the step may use drafts (``Speculation.should_draft``)."""
    stores: list[OffloadedBlock] = field(default_factory=list)
    """Copies from the KV cache to the host tier of the prefix cache."""
    loads: list[OffloadedBlock] = field(default_factory=list)
    """Copies from the host tier of the prefix cache to the KV cache."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)."""
    swapped: list[Sequence] = field(default_factory=list)
    """Sequences whose blocks are in ``swap_out``."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) device blocks of copies on write."""
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    encoder_tokens: int = 0
    """Number of image patches and audio positions to encode before the step, which add to its duration."""

    @property
    def tokens(self) -> int:
        """Number of tokens to compute, drafts included."""
        return sum(item.length + len(item.draft) for item in self.scheduled)

    def __bool__(self) -> bool:
        return bool(self.scheduled or self.swap_out or self.stores)
