"""A smaller model that guesses what a larger one will say."""

from __future__ import annotations

from copy import copy

import msgspec

from penstock.core import EngineRequest

from ..scheduling.plan import Item, Outcome, Plan
from ..scheduling.sequence import Sequence
from ..worker.worker import Runner
from .speculation import UNKNOWN


class DraftModel:
    """Guesses by drawing, as the sequence itself draws: with its parameters and its random numbers.

    Its keys and values lie in blocks of the same numbers as the larger model's, in a cache of its own. It computes what
    it lacks of a sequence when it is to guess, be it all of the prompt or a token.

    Args:
        tokens: of a step, at most.
    """

    def __init__(self, runner: Runner, *, blocks: int, block_size: int, rows: int, tokens: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._tokens = tokens
        self._own: list[Sequence | None] = [None] * rows
        """Of each row the sequence as it was here last: ``computed`` says how many of its tokens are in the cache."""
        self._names: list[bytes | None] = [None] * blocks
        """Which prefix each block holds here, so that those that others left are found."""

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        return [UNKNOWN] * most

    def fill(self, plan: Plan) -> None:
        wanting = [item for item in plan.items if item.draft]
        budget, guessing = self._tokens, list[tuple[Item, Sequence]]()
        for item in wanting:
            own = self._resume(item.sequence)
            lacking = len(own.tokens) - own.computed
            if lacking <= budget:
                guessing.append((item, own))
            elif budget:  # a part of it now, and guesses another time
                self._run([(own, budget)])
            budget = max(budget - lacking, 0)
        for place in range(max((len(item.draft) for item, _ in guessing), default=0)):
            guessing = [(item, own) for item, own in guessing if len(item.draft) > place]
            drawn = self._run([(own, len(own.tokens) - own.computed) for _, own in guessing])
            for (item, own), token in zip(guessing, drawn, strict=True):
                item.draft[place] = token
                own.tokens.append(token)

    def follow(self, plan: Plan, outcome: Outcome) -> None:
        """What it lacks it computes when it is to guess."""

    def _resume(self, sequence: Sequence) -> Sequence:
        """The sequence as it is now, with as much computed as is still true."""
        known = self._own[sequence.row]
        own = copy(sequence)
        if known is not None and known.blocks is sequence.blocks and known.order == sequence.order:
            own.request, own.computed = known.request, known.planned
            since = slice(known.planned, known.computed)
            for guessed, token in zip(known.tokens[since], own.tokens[since], strict=False):
                if guessed != token:
                    break
                own.computed += 1
            own.computed = min(own.computed, known.computed)
        else:
            own.request, own.computed = _plain(sequence.request), 0
            for block, name in zip(own.blocks, own.chain, strict=False):
                if self._names[block] != name:
                    break
                own.computed += self._block_size
        own.tokens, own.guide = list(sequence.tokens), None
        own.prompt_logprobs = own.context_logits = None
        own.computed = min(own.computed, len(own.tokens) - 1)
        own.planned = len(own.tokens)  # from there on they are guesses
        self._own[sequence.row] = own
        return own

    def _run(self, wanted: list[tuple[Sequence, int]]) -> list[int]:
        """Compute so many tokens of each; returns what those draw that have no more."""
        items = []
        for own, count in wanted:
            samples = (own,) if own.computed + count == len(own.tokens) else ()
            items.append(Item(own, own.computed, count, samples, []))
            before, own.computed = own.computed, own.computed + count
            for full in range(before // self._block_size, min(own.computed // self._block_size, len(own.chain))):
                self._names[own.blocks[full]] = own.chain[full]
        outcome = self._runner.collect(self._runner.submit(Plan(items=items)))
        return [draw.token_ids[0] for draw in outcome.draws]


def _plain(request: EngineRequest) -> EngineRequest:
    """Without what only costs time."""
    sampling = request.sampling.replace(logprobs=None, return_generation_logits=False, guided_decoding=None)
    return msgspec.structs.replace(request, sampling=sampling)
