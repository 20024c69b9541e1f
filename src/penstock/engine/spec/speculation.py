"""Speculative decoding: tokens guessed ahead, of which the model confirms several in one step.

The model draws its own token wherever one was guessed, and guesses are kept as far as they are what it drew (Leviathan
et al., 2023, with the draw itself in place of their test): an output is the same with and without, greedy or not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..scheduling.plan import Outcome, Plan
from ..scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""Stands for a token that is guessed only when its turn comes."""
MOST_FAILURES = 8
"""Of a drafter since the engine started, after which nothing is guessed any more."""
TRIAL, HOLD = 16, 512
"""Steps with and without guesses that are compared, and steps until they are compared again."""
FARTHEST = 32_768
"""Last tokens of a prompt that are looked through: reading them takes 0.2 s, in which nothing else goes on."""


class Drafter(Protocol):
    """Who guesses."""

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """What may come after the tokens of a sequence, at most so many; ``UNKNOWN`` for what ``fill`` will know."""
        ...

    def fill(self, plan: Plan) -> None:
        """Put guesses in the place of ``UNKNOWN``; the blocks for them are there now."""
        ...

    def follow(self, plan: Plan, outcome: Outcome) -> None:
        """A step was made, and its tokens are appended."""
        ...


class Lookup:
    """What followed the last tokens where they came before (prompt lookup, Saxena, 2023).

    Args:
        longest, shortest: how many last tokens are looked for; the longest that are found count.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        tokens, prompt = sequence.tokens, sequence.prompt_length
        if not sequence.seen_in_prompt:
            self._read(tokens, max(prompt - FARTHEST, 0) + 1, prompt, sequence.seen_in_prompt)
        self._read(tokens, sequence.read, len(tokens), sequence.seen)
        sequence.read = len(tokens)
        for length in self._lengths:
            run = tuple(tokens[-length:])
            if (at := sequence.seen.get(run, sequence.seen_in_prompt.get(run))) is not None:
                guessed: list[int] = []
                for source in range(at, at + most):  # what goes on beyond the end goes on with what is guessed
                    guessed.append(tokens[source] if source < len(tokens) else guessed[source - len(tokens)])
                return guessed
        return []

    def fill(self, plan: Plan) -> None:
        """Everything is known already."""

    def follow(self, plan: Plan, outcome: Outcome) -> None:
        """Tokens are read when they are looked through."""

    def _read(self, tokens: list[int], begin: int, end: int, seen: dict[tuple[int, ...], int]) -> None:
        """Note where what came after each run of tokens begins, from ``begin`` to before ``end``."""
        for at in range(begin, end):
            for length in self._lengths:
                if length <= at:
                    seen[tuple(tokens[at - length : at])] = at


@dataclass
class Counts:
    """Since the engine started."""

    drafts: int = 0
    """Times that tokens were guessed."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """By how many were guessed before it."""


class Speculation:
    """A drafter at work: how far it guesses, how often it was right, and whether that pays.

    Args:
        most: tokens guessed at a time.
        adaptive: whether to stop where it does not pay.
    """

    def __init__(self, drafter: Drafter, most: int, adaptive: bool = True) -> None:
        self._drafter = drafter
        self._most = most
        self._trials: dict[int, Trial] | None = {} if adaptive else None
        self._guessing = True
        self._failures = 0
        self._size = 0
        """Of the step that is planned, in powers of two: whether guesses pay depends on it."""
        self.counts = Counts(accepted_at=[0] * most)

    def begin(self, sequences: int) -> None:
        """A step is planned for so many sequences."""
        self._size = sequences.bit_length()
        if self._trials is not None:
            self._guessing = self._trials.setdefault(self._size, Trial()).guessing

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """What may come next; at most so many tokens."""
        reach = min(self._most if sequence.reach is None else sequence.reach, most)
        if not self._guessing or self._off or reach < 1:
            return []
        try:
            guessed = self._drafter.guess(sequence, reach)
            return guessed if UNKNOWN in guessed else _possible(sequence, guessed)
        except Exception:
            self._fail([sequence])
            return []

    def fill(self, plan: Plan) -> None:
        """Guess what only now can be guessed."""
        if self._off:
            return
        drafted = [item for item in plan.items if item.draft]
        try:
            self._drafter.fill(plan)
            for item in drafted:
                item.draft[:] = _possible(item.sequence, [token for token in item.draft if token != UNKNOWN])
        except Exception:
            for item in drafted:
                item.draft.clear()
            self._fail(item.sequence for item in drafted)

    def learn(self, plan: Plan, outcome: Outcome, seconds: float) -> None:
        """How a step went. To be told before its tokens are appended."""
        tokens, draws = 0, iter(outcome.draws)
        for item in plan.items:
            drawn = [next(draws) for _ in item.samples]
            tokens += sum(len(draw.token_ids) for draw in drawn)
            if item.draft:
                self._count(item.sequence, len(item.draft), len(drawn[0].token_ids) - 1)
        if self._trials is not None and all(item.length == 1 for item in plan.items):
            self._trials[self._size].note(tokens, seconds)

    def follow(self, plan: Plan, outcome: Outcome) -> None:
        """A step was made, and its tokens are appended."""
        if self._off:
            return
        try:
            self._drafter.follow(plan, outcome)
        except Exception:
            self._fail(sequence for item in plan.items for sequence in item.samples)

    @property
    def _off(self) -> bool:
        return self._failures >= MOST_FAILURES

    def _fail(self, sequences: Iterable[Sequence]) -> None:
        """A drafter has failed: these sequences go on without guesses, and all do where it fails again and again."""
        for sequence in sequences:
            sequence.reach = 0
        self._failures += 1
        logger.exception("speculative decoding failed and ends %s", "for good" if self._off else "for its sequences")

    def _count(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        counts = self.counts
        counts.drafts += 1
        counts.draft_tokens += guessed
        counts.accepted_tokens += accepted
        sequence.draft_tokens += guessed
        sequence.accepted_tokens += accepted
        for place in range(accepted):
            counts.accepted_at[place] += 1
        reach = self._most if sequence.reach is None else sequence.reach
        # As transformers' assisted generation does it by default.
        sequence.reach = min(reach + 2, self._most) if accepted == guessed else max(reach - 1, 1)


class Trial:
    """Tries by turns whether more tokens a second come with guesses or without, and stays with what is better."""

    def __init__(self) -> None:
        self.guessing = True
        self._begin(TRIAL, switched=True)
        self._rates: dict[bool, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """A step brought so many tokens in so much time."""
        self._left -= 1
        if self._left < self._counted:
            self._tokens += tokens
            self._seconds += seconds
        if self._left:
            return
        self._rates[self.guessing] = self._tokens / max(self._seconds, 1e-9)
        if len(self._rates) == 1:
            self.guessing = not self.guessing
            self._begin(TRIAL, switched=True)
        else:
            better = self._rates[True] >= self._rates[False]
            self._begin(HOLD, switched=better is not self.guessing)
            self.guessing = better
            self._rates.clear()

    def _begin(self, steps: int, switched: bool) -> None:
        """The first steps after a change have to make up for what was not done before it, and do not count."""
        self._left, self._counted = steps, steps - 2 * switched
        self._tokens, self._seconds = 0, 0.0


def _possible(sequence: Sequence, guessed: list[int]) -> list[int]:
    """Up to the token that would end the sequence, or that its form does not allow."""
    end = next((i for i, token in enumerate(guessed) if token in sequence.stops), len(guessed))
    if sequence.guide and end:
        end = sequence.guide.allows(guessed[:end])
    return guessed[:end]
