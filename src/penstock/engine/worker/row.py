"""Rows of the worker's batch (running sequences), and positions at which tokens are sampled."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.core import SamplingParams

from ..step import NewRow
from .token_counts import TokenCounts


class Row:
    """A running sequence. Attributes without a description are the fields of ``NewRow`` with the same name.

    Args:
        new: message that starts the row.
        tokens: the row's view of ``InputBatch.tokens``, ``[max_len + 1]`` int32. The batch writes tokens to it; the row
            does not know their number.
        adjusts_logits: True if the sampling parameters need a logits processor.
    """

    def __init__(self, new: NewRow, tokens: np.ndarray, adjusts_logits: bool) -> None:
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
        self.image_spans = new.image_spans
        self.mrope_positions = new.mrope_positions
        self.head = new.head
        self.pooling_token_ids = new.pooling_token_ids
        self.rules = new.audio.rules if new.audio else None
        self.counts: TokenCounts | None = None
        """Token counts for penalties; None until the first use of ``Position.counts``."""
        self._takes_argmax = not (self.rules or self.num_candidates or adjusts_logits)
        self.is_plain_greedy = self._takes_argmax and _needs_token_alone(self.params)
        """True if the next token is the argmax of the unadjusted logits, and no logprobs or logits are returned."""

    def fork(self, index: int, tokens: np.ndarray) -> Row:
        """Create the row of another sequence of the same request, without prompt logprobs and context logits.

        Args:
            index: index of the new sequence in the request.
            tokens: tokens of the new row in the batch, equal to the tokens of this row.
        """
        child = Row.__new__(Row)
        child.__dict__ |= self.__dict__
        child.tokens, child.index, child.counts = tokens, index, None
        child.prompt_logprobs, child.context_logits = None, False
        return child

    def num_prompt_logprobs(self, start: int, length: int) -> int:
        """Number of prompt logprobs returned by a step that computes ``length`` tokens from ``start`` on. The first one
        is that of prompt token ``start + 1``."""
        if self.prompt_logprobs is None:
            return 0
        return max(min(length, self.prompt_length - 1 - start), 0)

    def num_context_logits(self, start: int, length: int) -> int:
        """Number of prompt tokens with returned logits in a step that computes ``length`` tokens from ``start`` on."""
        return max(min(length, self.prompt_length - start), 0) if self.context_logits else 0

    @property
    def has_prompt_outputs(self) -> bool:
        """True if steps return prompt logprobs, context logits or hidden states of the prompt."""
        return self.prompt_logprobs is not None or self.context_logits or bool(self.pooling)

    @property
    def needs_token_values(self) -> bool:
        """True if sampling needs the ids of all previous tokens, for bad words or penalties."""
        return self.params.needs_token_values

    def position(self, length: int) -> Position:
        """Position after the first ``length`` tokens."""
        return Position(self, length, self.params, self.is_plain_greedy)

    def draft_position(self, length: int) -> Position:
        """Position after the first ``length`` tokens, for drafting: the sampling parameters are those of the row, but
        without logprobs, logits and grammar."""
        params, is_plain_greedy = self._draft_params
        return Position(self, length, params, is_plain_greedy)

    @cached_property
    def _draft_params(self) -> tuple[SamplingParams, bool]:
        params = self.params.replace(logprobs=None, return_generation_logits=False, guided_decoding=None)
        return params, self._takes_argmax and _needs_token_alone(params)


class Position(NamedTuple):
    """A position at which a token is sampled: after the first ``length`` tokens of a row."""

    row: Row
    length: int
    params: SamplingParams
    is_plain_greedy: bool
    """True if the next token is the argmax of the unadjusted logits (see ``Row.is_plain_greedy``)."""

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens before the position."""
        return self.length - self.row.prompt_length

    @property
    def counts(self) -> TokenCounts:
        """Counts of the tokens before the position."""
        if self.row.counts is None:
            self.row.counts = TokenCounts(self.row.prompt_length)
        self.row.counts.count(self.row.tokens, self.length)
        return self.row.counts


def _needs_token_alone(params: SamplingParams) -> bool:
    return params.greedy and params.logprobs is None and not params.return_generation_logits
