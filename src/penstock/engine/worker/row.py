"""A row of the worker's batch: what sampling needs to know of a sequence."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.core import SamplingParams

from ..step import NewRow
from .token_counts import TokenCounts


class Row:
    """A sequence that runs.

    Args:
        tokens: ``[max_len]`` int32, of which the caller knows how many are there.
    """

    def __init__(self, new: NewRow, tokens: np.ndarray) -> None:
        self.params: SamplingParams = new.sampling
        self.tokens = tokens
        self.prompt_length = new.prompt_length
        self.stop_token_ids = new.stop_token_ids
        self.seed = new.seed
        self.index = new.index
        self.num_candidates = new.num_candidates
        self.prompt_logprobs = new.prompt_logprobs
        self.context_logits = new.context_logits
        self.pooling = new.pooling
        self.counts: TokenCounts | None = None
        """Kept where penalties have asked for them."""
        self.argmax = _wants_argmax(self.params, self.num_candidates)
        """Whether the next token is the argmax of the logits as they are, and nothing else is asked for."""

    def fork(self, index: int, tokens: np.ndarray) -> Row:
        """A sibling, to which nothing is told of the prompt."""
        twin = Row.__new__(Row)
        twin.__dict__ |= self.__dict__
        twin.tokens, twin.index, twin.counts = tokens, index, None
        twin.prompt_logprobs, twin.context_logits = None, False
        return twin

    def prompt_tokens(self, start: int, length: int) -> int:
        """How many of the tokens after ``start`` and the ``length - 1`` that follow it are the prompt's, and have their
        probabilities told."""
        if self.prompt_logprobs is None:
            return 0
        return max(min(length, self.prompt_length - 1 - start), 0)

    def context_tokens(self, start: int, length: int) -> int:
        """How many of the ``length`` tokens from ``start`` on are the prompt's, and have the logits after them told."""
        return max(min(length, self.prompt_length - start), 0) if self.context_logits else 0

    @property
    def tells_prompt(self) -> bool:
        """Whether more than the last hidden state is wanted of a prompt."""
        return self.prompt_logprobs is not None or self.context_logits or bool(self.pooling)

    def position(self, length: int) -> Position:
        """Where the token after the first ``length`` is sampled."""
        return Position(self, length, self.params, self.argmax)

    def draft_position(self, length: int) -> Position:
        """The same for a drafter: without what only costs time."""
        params, argmax = self._draft_params
        return Position(self, length, params, argmax)

    @cached_property
    def _draft_params(self) -> tuple[SamplingParams, bool]:
        params = self.params.replace(logprobs=None, return_generation_logits=False, guided_decoding=None)
        return params, _wants_argmax(params, self.num_candidates)


class Position(NamedTuple):
    """Where a token is sampled: behind the first ``length`` tokens of a row."""

    row: Row
    length: int
    params: SamplingParams
    argmax: bool

    @property
    def generated(self) -> int:
        return self.length - self.row.prompt_length

    @property
    def counts(self) -> TokenCounts:
        """Of the tokens before."""
        if self.row.counts is None:
            self.row.counts = TokenCounts(self.row.prompt_length)
        self.row.counts.count(self.row.tokens, self.length)
        return self.row.counts


def _wants_argmax(params: SamplingParams, num_candidates: int) -> bool:
    told = num_candidates or params.logprobs is not None or params.return_generation_logits
    adjusted = (
        params.allowed_token_ids is not None
        or params.bad_word_ids
        or params.min_tokens > 0
        or params.logit_bias
        or params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )
    return params.greedy and not told and not adjusted
