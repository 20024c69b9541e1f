"""What one step does, and what came of it: the messages between scheduler and runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from penstock.core import Failure, Logprob

from .sequence import Sequence


class Item(NamedTuple):
    """Tokens ``start`` to ``start + length`` of one sequence."""

    sequence: Sequence
    start: int
    length: int
    samples: tuple[Sequence, ...]
    """Sequences that draw a token after the last one computed: none in the middle of a prompt, one as a rule, all
    of a request's sequences where they part."""
    draft: list[int]
    """Tokens guessed to come next, computed along: whoever draws then draws after each of them, too."""


@dataclass(slots=True)
class Plan:
    """One step. Blocks are moved before anything is computed, in the order of these fields."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to), both device blocks: what is shared is copied before it is written."""
    items: list[Item] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(item.length + len(item.draft) for item in self.items)

    def __bool__(self) -> bool:
        return bool(self.items or self.swap_out)


class Candidates(NamedTuple):
    """What a beam may go on with: the likeliest tokens, the best first."""

    token_ids: np.ndarray
    """``[candidates]`` int64."""
    logprobs: np.ndarray
    """``[candidates]`` float32."""


class Draw(NamedTuple):
    """What one sequence drew in a step."""

    token_ids: list[int]
    """One, after those of its draft that it would have drawn itself."""
    logprobs: list[list[Logprob]] | None = None
    logits: list[bytes] | None = None
    """Of each token the scores it was chosen by, ``[vocabulary]`` float32, where they are wanted."""
    candidates: Candidates | None = None
    """Of a beam, which draws none itself."""
    failure: Failure | None = None
    """Why there is no token, and the sequence cannot go on."""


class Outcome(NamedTuple):
    """What a step brought."""

    draws: list[Draw]
    """One for each sequence of each item's ``samples``, in their order."""
    prompt_logprobs: dict[int, list[list[Logprob]]] = {}  # noqa: RUF012 - a tuple's default, never written
    """By item: of the prompt tokens after each computed one, where they are wanted."""
    context_logits: dict[int, bytes] = {}  # noqa: RUF012 - likewise
    """By item: scores after each of its prompt tokens, ``[tokens, vocabulary]`` float32, where they are wanted."""
    hidden: Any = None
    """A tensor ``[tokens, hidden]``, for heads that guess from it."""
    states: dict[int, np.ndarray] = {}  # noqa: RUF012 - likewise
    """By item: hidden states that its vector is made of, ``[tokens, hidden]`` float32."""
