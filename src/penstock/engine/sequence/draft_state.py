"""State of speculative decoding for one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

SEQUENCE_TRIALS = 2.0
"""Number of accepted tokens as which the initial factor of a sequence counts."""


class Proposal(NamedTuple):
    """Tokens that a drafter proposes after the tokens of a sequence."""

    token_ids: list[int]
    contexts: list[int]
    """Context of each token: the index of the estimated rate at which it is accepted if all tokens before it are."""


NOTHING = Proposal([], [])


@dataclass(slots=True)
class DraftState:
    """State of speculative decoding for one sequence."""

    proposal: Proposal = NOTHING
    """Last proposal, which is compared with the tokens that the sequence gets."""
    at: int = -1
    """Number of tokens of the sequence when ``proposal`` was made; -1 before the first proposal."""
    accepted: float = SEQUENCE_TRIALS
    """Accepted tokens; earlier ones count less."""
    expected: float = SEQUENCE_TRIALS
    """Expected value of ``accepted`` by the rates of the contexts."""
    failed: bool = False
    """True after an error of the drafter: the sequence gets no more drafts."""
    history: Any = None
    """``TokenHistory`` of the sequence's tokens (``SuffixDrafter``)."""
    source: Any = None
    """History with the occurrence that ``proposal`` follows, its end and its length (``SuffixDrafter``)."""
