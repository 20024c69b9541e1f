"""Plans: what the scheduler decides for one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .sequence import Sequence


class Item(NamedTuple):
    """Tokens ``start`` to ``start + length`` of one sequence."""

    sequence: Sequence
    start: int
    length: int
    samples: tuple[Sequence, ...]
    """Sequences that sample a token after the last one computed: none in the middle of a prompt, one as a rule; all
    of a request's sequences where they fork."""
    draft: list[int]
    """Draft tokens, verified in the same step."""


@dataclass(slots=True)
class Plan:
    """One step. Blocks are moved before anything is computed: swapped out, swapped in, then copied."""

    num_running: int = 0
    """Number of running sequences when the step was planned."""
    drafting: bool = False
    """Whether sequences could get drafts."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)."""
    swapped: list[Sequence] = field(default_factory=list)
    """Sequences whose blocks are in ``swap_out``."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to), both device blocks: a shared block is copied before it is written."""
    items: list[Item] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens to compute, drafts included."""
        return sum(item.length + len(item.draft) for item in self.items)

    def __bool__(self) -> bool:
        return bool(self.items or self.swap_out)
