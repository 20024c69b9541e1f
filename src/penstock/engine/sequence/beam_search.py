"""Beam search: the likeliest sequences, found by going on with the best of all continuations at each step.

The rules are those of transformers' ``generate`` with ``num_beams``, so that both find the same: which continuations
are looked at, when a search ends, and that a sequence's log probability is divided by a power of its length.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import NamedTuple

import numpy as np

from penstock.core import Code, Failure, FinishReason, Logprob, PerfMetrics, TokenDelta

from ..guided import Guide
from ..step import Candidates
from .sequence import Sequence

Path = tuple["Path", Logprob] | None
"""How likely each token of a beam was: that of the last one, behind those before it."""
NEVER = np.float32(-1e9)
"""The log probability of a beam that only fills a place."""


class Branch(NamedTuple):
    """How a beam goes on."""

    parent: int
    """Which beam it comes from."""
    token: int
    guide: Guide | None
    path: Path


class Found(NamedTuple):
    """A sequence that has come to its end."""

    score: np.float32
    """What it is compared by."""
    logprob: float
    token_ids: list[int]
    """All that were generated."""
    path: Path
    stopped: bool
    """Whether it ended by itself, and not because it is as long as it may be."""
    stop_token: int | None


class BeamSearch:
    """The search of one request.

    Its beams are as many sequences, which are all one step further whenever each of them has told what it may go on
    with.
    """

    def __init__(self, first: Sequence) -> None:
        sampling = first.request.sampling
        self._width = sampling.width
        self._power = sampling.length_penalty
        self._early = sampling.early_stopping
        self.num_candidates = max(2, 1 + len(first.stops)) * self._width
        """Continuations that are looked at: enough to go on where the best ones all come to an end."""
        self._logprobs = [np.float32(0), *[NEVER] * (self._width - 1)]  # before they part all are the same
        self._paths: list[Path] = [None] * self._width
        self.guide: Guide | None = None
        """What the search has begun with, since it has."""
        self._told: dict[int, Candidates] = {}
        self.found: list[Found] = []
        """The best that have come to their end, as many as there are beams at most."""

    def tell(self, beam: int, candidates: Candidates) -> None:
        """What a beam may go on with."""
        self._told[beam] = candidates

    @property
    def all_told(self) -> bool:
        return len(self._told) == self._width

    def choose(self, beams: Row[Sequence]) -> list[Branch] | None:
        """How the beams go on, the best first; None where the search is over."""
        first = beams[0]
        length = first.generated + 1
        full = len(first.tokens) + 1 >= first.max_len
        candidates = self._best()
        self._told.clear()
        going: list[tuple[np.float32, Branch]] = []
        ended: list[Found] = []
        for rank, (logprob, parent, token, own, place) in enumerate(candidates):
            if rank >= self._width and len(going) >= self._width:
                break
            guide, complete = beams[parent].guide, False
            if guide and token in first.request.eos_token_ids:
                token = guide.replace_eos(token)
            stops = token in first.stops and length > first.request.sampling.min_tokens
            if guide and not stops:
                guide = guide.copy()
                complete = not guide.take(token) or guide.complete
            path = self._paths[parent], Logprob(token, float(own), place)
            if not (stops or complete or full):
                going.append((logprob, Branch(parent, token, guide, path)))
            elif rank < self._width:
                score = np.float32(logprob / length**self._power)
                tokens = [*beams[parent].tokens[first.prompt_length :], token]
                ended.append(Found(score, float(logprob), tokens, path, stops or complete, token if stops else None))
        if not (self._early is True and len(self.found) == self._width):
            self.found = sorted((*self.found, *ended), key=lambda found: -found.score)[: self._width]
        if not going or self._over(going[0][0], length, first.max_len - first.prompt_length):
            return None
        going = going[: self._width]
        going += [(NEVER, going[0][1])] * (self._width - len(going))
        self._logprobs = [logprob for logprob, _ in going]
        branches = [branch for _, branch in going]
        self._paths = [branch.path for branch in branches]
        return [
            branch if at == branches.index(branch) or not branch.guide else branch._replace(guide=branch.guide.copy())
            for at, branch in enumerate(branches)
        ]

    def _best(self) -> list[tuple[np.float32, int, int, np.float32, int]]:
        """The best continuations of all beams, of equals the first ones: log probability, beam and token of each, and
        the token's own log probability and rank."""
        logprobs = np.concatenate([self._logprobs[beam] + told.logprobs for beam, told in self._told.items()])
        own = np.concatenate([told.logprobs for told in self._told.values()])
        places = np.concatenate([1 + np.arange(len(told.token_ids)) for told in self._told.values()])
        parents = np.repeat(list(self._told), [len(told.token_ids) for told in self._told.values()])
        tokens = np.concatenate([told.token_ids for told in self._told.values()])
        best = np.lexsort((tokens, parents, -logprobs))[: self.num_candidates]
        told = (logprobs[best], parents[best].tolist(), tokens[best].tolist(), own[best], places[best].tolist())
        return list(zip(*told, strict=True))

    def deltas(self, beams: Row[Sequence]) -> list[TokenDelta]:
        """What the search has found, each sequence in one piece. Where there are fewer than were asked for, the last
        one comes again; where there is none, nothing could come next.

        Args:
            beams: all of it, of which the first knows what is to be told of the prompt.
        """
        first = beams[0]
        sampling, request_id = first.request.sampling, first.request.request_id
        allocated = sum(beam.allocated_blocks for beam in beams)  # one search's, whichever beams were chosen
        perf = PerfMetrics(first.first_scheduled, allocated, 0, 0) if sampling.return_perf_metrics else None
        wanted = sampling.told
        if not self.found:
            failure = Failure(Code.INVALID, "no token may come next: what is asked for leaves none")
            return [
                TokenDelta(request_id=request_id, sequence=index, finished=FinishReason.ERROR, failure=failure)
                for index in range(wanted)
            ]
        every = (self.found + [self.found[-1]] * wanted)[:wanted]
        return [
            TokenDelta(
                request_id=request_id,
                sequence=index,
                token_ids=list(found.token_ids),
                logprobs=None if sampling.logprobs is None else _unrolled(found.path),
                cumulative_logprob=found.logprob,
                prompt_logprobs=first.prompt_logprobs if index == 0 else None,
                context_logits=b"".join(first.context_logits) if first.context_logits and index == 0 else None,
                finished=FinishReason.STOP if found.stopped else FinishReason.LENGTH,
                stop_token=found.stop_token,
                cached_tokens=first.cached or 0,
                queued=first.queued,
                perf=perf if index == 0 else None,
            )
            for index, found in enumerate(every)
        ]

    def _over(self, best: np.float32, length: int, longest: int) -> bool:
        """Whether what goes on is not worth it, the best of which has that log probability."""
        if len(self.found) < self._width:
            return False
        if self._early is True:
            return True
        possible = longest if self._early == "never" and self._power > 0 else length
        return bool(best / possible**self._power <= self.found[-1].score)


def _unrolled(path: Path) -> list[list[Logprob]]:
    """From the first token on."""
    found: list[list[Logprob]] = []
    while path:
        path, last = path
        found.append([last])
    return found[::-1]
