"""Plans: what the scheduler decides for one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence in a step, which computes its tokens ``start`` to ``start + length``."""

    sequence: Sequence
    start: int
    length: int
    sampling_sequences: tuple[Sequence, ...]
    """Sequences that sample the token at ``start + length``: empty in the middle of a prompt; ``sequence`` otherwise,
    and in a request's first sampling step also those forked from it."""
    draft: list[int]
    """Draft token ids that follow these tokens, verified in the same step."""
    parents: list[int]
    """Of a tree of draft tokens in depth-first order: index of the one before each, -1 for these tokens' last; empty
    if each follows the one before it."""


class OffloadedBlock(NamedTuple):
    """A cached block on its way between the KV cache and the host tier."""

    block: int
    """Of the KV cache."""
    slot: int
    """Of the host tier."""
    block_hash: bytes


@dataclass(slots=True)
class Plan:
    """One step. Blocks are moved before anything is computed: stored, swapped out, swapped in, copied, then
    loaded."""

    num_running: int = 0
    """Number of running sequences when the step was planned."""
    drafting: bool = False
    """True if drafts were allowed in the step (``Speculation.should_draft``)."""
    stores: list[OffloadedBlock] = field(default_factory=list)
    """Copies to the host tier of the prefix cache."""
    loads: list[OffloadedBlock] = field(default_factory=list)
    """Copies from it."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)."""
    swapped: list[Sequence] = field(default_factory=list)
    """Sequences whose blocks are in ``swap_out``."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target), both device blocks: copies on write, of shared blocks that are written next."""
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    encoder_tokens: int = 0
    """Patches of the images that are encoded before the step, of which its duration depends, too."""

    @property
    def tokens(self) -> int:
        """Number of tokens to compute, drafts included."""
        return sum(item.length + len(item.draft) for item in self.scheduled)

    def __bool__(self) -> bool:
        return bool(self.scheduled or self.swap_out or self.stores)
