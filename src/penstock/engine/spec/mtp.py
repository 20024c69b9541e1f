"""Heads of the model itself that guess what comes after the next token (multi-token prediction)."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ..scheduling.plan import Item, Outcome, Plan
from ..scheduling.sequence import Sequence
from ..worker.worker import Runner
from .speculation import UNKNOWN


class Guess(NamedTuple):
    """What comes next, and from what the token after it is guessed."""

    order: int
    sibling: int
    known: int
    """Tokens that the sequence has before it."""
    token: int
    state: Tensor
    """``[hidden]``"""


class HeadsAhead:
    """Guesses with the model's own heads, which read what the model has made of each token.

    They follow every step, so that their keys and values are there for all tokens, in blocks of the same numbers as the
    model's. What they lack after a swap, or at the last place of a shared prefix, costs guesses and nothing else.

    Args:
        heads: how many there are; the last one guesses whatever is further on, too.
        rows: sequences that may run at the same time.
    """

    def __init__(self, runner: Runner, heads: int, rows: int) -> None:
        self._runner = runner
        self._heads = heads
        self._guesses: list[Guess | None] = [None] * rows

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        known = self._guesses[sequence.row]
        whose = (sequence.order, sequence.index, len(sequence.tokens))
        if known is None or (known.order, known.sibling, known.known) != whose:
            return []
        return [known.token, *[UNKNOWN] * (most - 1)]

    def fill(self, plan: Plan) -> None:
        guessing = [(item, guess) for item in plan.items if item.draft and (guess := self._guesses[item.sequence.row])]
        for place in range(1, max((len(item.draft) for item, _ in guessing), default=0)):
            guessing = [(item, guess) for item, guess in guessing if len(item.draft) > place]
            later = [item.sequence.ahead(item.draft[:place]) for item, _ in guessing]
            items = [_following(sequence, len(sequence.tokens) - 2, 1) for sequence in later]
            last, draws = self._runner.ahead(
                min(place, self._heads - 1), items, torch.stack([guess.state for _, guess in guessing])
            )
            for i, (item, guess) in enumerate(guessing):
                item.draft[place] = draws[i].token_ids[0]
                guessing[i] = item, guess._replace(state=last[i])

    def follow(self, plan: Plan, outcome: Outcome) -> None:
        """Compute keys and values of what the model has computed, and the first guess."""
        items: list[Item] = []
        rows: list[int] = []
        end = 0
        for item in plan.items:
            begin, end = end, end + item.length + len(item.draft)
            for sequence in item.samples or (item.sequence,):
                count = sequence.computed - item.start
                first = 0 if sequence is item.sequence else count - 1  # which siblings share but for the last one
                if sequence.blocks and count > 0 and not sequence.beams:
                    items.append(_following(sequence, item.start + first, count - first))
                    rows += range(begin + first, begin + count)
        if not items:
            return
        last, draws = self._runner.ahead(0, items, outcome.hidden[rows])
        for item, state, draw in zip(items, last, draws, strict=True):
            sequence = item.samples[0]
            guess = Guess(sequence.order, sequence.index, len(sequence.tokens), draw.token_ids[0], state)
            self._guesses[sequence.row] = guess if guess.known == sequence.computed + 1 else None


def _following(sequence: Sequence, start: int, count: int) -> Item:
    """So many positions from ``start`` on, each with the token after the one that is there."""
    shifted = copy(sequence)
    shifted.tokens = sequence.tokens[1:]
    return Item(shifted, start, count, (sequence,), [])
