"""Beam search: finds the most likely sequences by extending the best beams in each step.

The search follows transformers' ``generate`` with ``num_beams``, so that both find the same sequences: in the number of
candidates, the condition that ends a search, and the division of log probabilities by a power of the length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.core import Code, Failure, FinishReason, Logprob, PerfMetrics, TokenDelta

from ..guided import Guide
from ..step import NO_TOKEN_ALLOWED, Candidates
from .sequence import Sequence

Logprobs = tuple["Logprobs", Logprob] | None
"""Logprobs of a beam's tokens: a linked list from the last token to the first, so that beams can share prefixes."""
DUPLICATE_LOGPROB = np.float32(-1e9)
"""Log probability of a duplicate beam, so that its candidates rank last. Before the first step, all beams but the first
are duplicates. Later, copies of the best beam replace missing beams if too few beams can be extended."""


class BeamStep(NamedTuple):
    """Next step of a beam: the parent beam to continue, and the token to append."""

    parent: int
    """Index of the parent beam."""
    token: int
    """Token appended to the parent's tokens."""
    guide: Guide | None
    """State of the grammar after ``token``."""
    logprobs: Logprobs
    """Logprobs of the parent's output tokens and ``token``."""


class Hypothesis(NamedTuple):
    """A finished sequence."""

    score: np.float32
    """``logprob / length ** length_penalty``; higher is better."""
    logprob: float
    """Sum of the log probabilities of ``token_ids``."""
    token_ids: list[int]
    """Output tokens."""
    logprobs: Logprobs
    """Logprobs of ``token_ids``."""
    stopped: bool
    """True if a stop token or the end of the grammar ended the sequence; False at the maximum length."""
    stop_token: int | None
    """Stop token that ended the sequence; None if no stop token did."""


class BeamSearch:
    """The beam search of one request.

    In each step, each beam gets its candidates (``add_candidates``). Once all beams have candidates (``ready``),
    ``select`` chooses the next beams.

    Args:
        first: the request's first sequence.
    """

    def __init__(self, first: Sequence) -> None:
        sampling = first.request.sampling
        self._num_beams = sampling.num_sequences
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self.num_candidates = max(2, 1 + len(first.stop_token_ids)) * self._num_beams
        """Number of candidates per beam: enough to extend all beams if the best candidates are stop tokens."""
        self._beam_logprobs = [np.float32(0), *[DUPLICATE_LOGPROB] * (self._num_beams - 1)]
        """Sum of the log probabilities of each beam's output tokens."""
        self._token_logprobs: list[Logprobs] = [None] * self._num_beams
        """Logprobs of each beam's output tokens."""
        self._candidates: dict[int, Candidates] = {}
        """Candidates of the current step, by index of the beam."""
        self._hypotheses: list[Hypothesis] = []
        """The best finished sequences, at most one per beam, the best first."""

    def add_candidates(self, beam: int, candidates: Candidates) -> None:
        """Add the most likely next tokens of beam number ``beam``."""
        self._candidates[beam] = candidates

    @property
    def ready(self) -> bool:
        """True if all beams have their candidates."""
        return len(self._candidates) == self._num_beams

    def select(self, beams: list[Sequence]) -> list[BeamStep] | None:
        """Select the next beams, the best first. Call this when ``ready``. Returns None if the search has ended."""
        first = beams[0]
        length = first.num_output_tokens + 1
        full = len(first.tokens) + 1 >= first.max_len
        candidates = self._best_candidates()
        self._candidates.clear()
        extended: list[tuple[np.float32, BeamStep]] = []
        finished: list[Hypothesis] = []
        for rank, (beam_logprob, parent, token, logprob, token_rank) in enumerate(candidates):
            if rank >= self._num_beams and len(extended) >= self._num_beams:
                break
            guide, complete = beams[parent].guide, False
            if guide and token in first.request.eos_token_ids:
                token = guide.replace_eos(token)
            stops = token in first.stop_token_ids and length > first.request.sampling.min_tokens
            if guide and not stops:
                guide = guide.copy()
                complete = not guide.accept_token(token) or guide.is_terminated
            logprobs = self._token_logprobs[parent], Logprob(token, float(logprob), token_rank)
            if not (stops or complete or full):
                extended.append((beam_logprob, BeamStep(parent, token, guide, logprobs)))
            elif rank < self._num_beams:
                score = np.float32(beam_logprob / length**self._length_penalty)
                tokens, stop_token = [*beams[parent].tokens[first.prompt_length :], token], token if stops else None
                finished.append(Hypothesis(score, float(beam_logprob), tokens, logprobs, stops or complete, stop_token))
        if not (self._early_stopping is True and len(self._hypotheses) == self._num_beams):
            hypotheses = sorted((*self._hypotheses, *finished), key=lambda hypothesis: -hypothesis.score)
            self._hypotheses = hypotheses[: self._num_beams]
        if not extended or self._ends(extended[0][0], length, first.max_len - first.prompt_length):
            return None
        extended = extended[: self._num_beams]
        extended += [(DUPLICATE_LOGPROB, extended[0][1])] * (self._num_beams - len(extended))
        self._beam_logprobs = [logprob for logprob, _ in extended]
        steps = [step for _, step in extended]
        self._token_logprobs = [step.logprobs for step in steps]
        return [  # a duplicate gets a copy of the guide
            step if at == steps.index(step) or not step.guide else step._replace(guide=step.guide.copy())
            for at, step in enumerate(steps)
        ]

    def _best_candidates(self) -> list[tuple[np.float32, int, int, np.float32, int]]:
        """The ``num_candidates`` best candidates of all beams, the best first; ties by lower beam, then lower token.

        Returns for each candidate: log probability of the extended beam, index of the beam, token id, log probability
        of the token, and rank among the candidates of the beam, starting at 1.
        """
        by_beam = self._candidates
        counts = [len(each.token_ids) for each in by_beam.values()]
        beam_logprobs = np.concatenate([self._beam_logprobs[beam] + each.logprobs for beam, each in by_beam.items()])
        logprobs = np.concatenate([each.logprobs for each in by_beam.values()])
        ranks = np.concatenate([1 + np.arange(count) for count in counts])
        parents = np.repeat(list(by_beam), counts)
        tokens = np.concatenate([each.token_ids for each in by_beam.values()])
        best = np.lexsort((tokens, parents, -beam_logprobs))[: self.num_candidates]
        columns = (
            beam_logprobs[best],
            parents[best].tolist(),
            tokens[best].tolist(),
            logprobs[best],
            ranks[best].tolist(),
        )
        return list(zip(*columns, strict=True))

    def deltas(self, beams: list[Sequence]) -> list[TokenDelta]:
        """Create one delta per sequence to return, the best first. Call this when the search has ended.

        If fewer than ``n`` hypotheses exist, the last one is repeated. Without hypotheses, no token was allowed, and
        all deltas have a failure.

        Args:
            beams: the request's sequences.
        """
        first = beams[0]
        sampling, request_id = first.request.sampling, first.request.request_id
        allocated = sum(beam.allocated_blocks for beam in beams)
        perf = PerfMetrics(first.first_scheduled, allocated, 0, 0) if sampling.return_perf_metrics else None
        count = sampling.num_returned
        if not self._hypotheses:
            failure = Failure(Code.INVALID, NO_TOKEN_ALLOWED)
            return [
                TokenDelta(request_id=request_id, sequence=index, finished=FinishReason.ERROR, failure=failure)
                for index in range(count)
            ]
        returned = (self._hypotheses + [self._hypotheses[-1]] * count)[:count]
        return [
            TokenDelta(
                request_id=request_id,
                sequence=index,
                token_ids=list(hypothesis.token_ids),
                logprobs=None if sampling.logprobs is None else _to_list(hypothesis.logprobs),
                cumulative_logprob=hypothesis.logprob,
                prompt_logprobs=first.prompt_logprobs if index == 0 else None,
                context_logits=b"".join(first.context_logits) if first.context_logits and index == 0 else None,
                finished=FinishReason.STOP if hypothesis.stopped else FinishReason.LENGTH,
                stop_token=hypothesis.stop_token,
                cached_tokens=first.num_cached_tokens or 0,
                queued=first.queued,
                perf=perf if index == 0 else None,
            )
            for index, hypothesis in enumerate(returned)
        ]

    def _ends(self, best: np.float32, length: int, max_len: int) -> bool:
        """True if the search ends according to ``early_stopping``.

        Args:
            best: log probability of the best beam.
            length: number of output tokens per beam.
            max_len: maximum number of output tokens.
        """
        if len(self._hypotheses) < self._num_beams:
            return False
        if self._early_stopping is True:
            return True
        possible = max_len if self._early_stopping == "never" and self._length_penalty > 0 else length
        return bool(best / possible**self._length_penalty <= self._hypotheses[-1].score)


def _to_list(logprobs: Logprobs) -> list[list[Logprob]]:
    """Convert a linked list to ``TokenDelta.logprobs``, in the order of the tokens, without top logprobs."""
    listed: list[list[Logprob]] = []
    while logprobs:
        logprobs, last = logprobs
        listed.append([last])
    return listed[::-1]
