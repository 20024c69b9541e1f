"""Guide for sequences with reasoning: limits the reasoning, and applies the grammar to the answer after it."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from penstock.core import EngineRequest, Failure, ReasoningSpan

from .backend import Grammar, Guide
from .tool_call_guide import ToolCallGrammar


class ReasoningPhase(Enum):
    """Part of the output to which the next token of a sequence belongs."""

    OPENING = auto()  # forced tokens at the start, ``ReasoningSpan.opening``
    BEFORE = auto()  # first token of the output, which begins either the reasoning or the answer
    REASONING = auto()  # reasoning, up to the end-of-reasoning token
    SEPARATOR = auto()  # forced tokens before the answer, ``ReasoningSpan.answer``
    ANSWER = auto()  # answer, which the grammar constrains


class ReasoningGuide(Guide):
    """Guides a sequence through its reasoning, then applies the guide of the answer.

    Args:
        span: token ids that delimit the reasoning.
        reasoning_limit: number of reasoning tokens after which the end-of-reasoning token is forced; None: unlimited.
        answer: guide of the answer; None allows any answer.
        answer_limit: maximum number of tokens of the answer; None: unlimited.
    """

    def __init__(
        self, span: ReasoningSpan, reasoning_limit: int | None, answer: Guide | None, answer_limit: int | None = None
    ) -> None:
        self._span = span
        self._reasoning_left = reasoning_limit
        """Number of reasoning tokens until the limit; None: unlimited."""
        self._answer = answer
        self._answer_left = answer_limit
        """Number of answer tokens until the limit; None: unlimited."""
        self._phase = ReasoningPhase.OPENING if span.opening else ReasoningPhase.BEFORE
        if span.begun:
            self._phase = ReasoningPhase.REASONING
        self._num_forced = 0
        """Number of forced tokens (``span.opening`` or ``span.answer``) generated so far in the current phase."""

    def copy(self) -> ReasoningGuide:
        answer = self._answer.copy() if self._answer else None
        copy = ReasoningGuide(self._span, self._reasoning_left, answer, self._answer_left)
        copy._phase, copy._num_forced = self._phase, self._num_forced
        return copy

    @property
    def is_unconstrained(self) -> bool:
        return not self._forced() and (self._answer is None or self._phase is ReasoningPhase.REASONING)

    def replace_eos(self, eos_token_id: int) -> int:
        """End-of-reasoning token for an EOS within the reasoning, if a guided answer has to follow."""
        return self._span.end if self._answer and self._phase is ReasoningPhase.REASONING else eos_token_id

    def accept_token(self, token: int) -> bool:
        span = self._span
        if self._phase is ReasoningPhase.OPENING:
            self._accept_forced(span.opening, ReasoningPhase.REASONING)
            return True
        if self._phase is ReasoningPhase.BEFORE:
            self._phase = ReasoningPhase.REASONING if token == span.begin else ReasoningPhase.ANSWER
            if self._phase is ReasoningPhase.REASONING:
                return True
        if self._phase is ReasoningPhase.REASONING:
            if token == span.end:
                separated = span.answer and (self._answer or self._reasoning_left == 0)
                self._phase = ReasoningPhase.SEPARATOR if separated else ReasoningPhase.ANSWER
            elif self._reasoning_left:
                self._reasoning_left -= 1
            return True
        if self._phase is ReasoningPhase.SEPARATOR:
            self._accept_forced(span.answer, ReasoningPhase.ANSWER)
            return True
        if self._answer_left:
            self._answer_left -= 1
        return self._answer is None or self._answer.accept_token(token)

    def _accept_forced(self, tokens: tuple[int, ...], next_phase: ReasoningPhase) -> None:
        """Count a forced token. After the last of ``tokens``, continue with ``next_phase``."""
        self._num_forced += 1
        if self._num_forced == len(tokens):
            self._phase, self._num_forced = next_phase, 0

    @property
    def failure(self) -> Failure | None:
        return self._answer.failure if self._answer else None

    @property
    def is_terminated(self) -> bool:
        return self._phase is ReasoningPhase.ANSWER and self._answer is not None and self._answer.is_terminated

    @property
    def token_limit_reached(self) -> bool:
        return self._answer_left == 0

    def validate_tokens(self, tokens: list[int]) -> int:
        state = self.copy()
        for i, token in enumerate(tokens):
            forced = state._forced()
            begins = state._phase is ReasoningPhase.BEFORE and token == self._span.begin
            if state._answer and not (forced or state.is_unconstrained or begins):
                return i + state._answer.validate_tokens(tokens[i:])
            if forced and token != forced[0]:
                return i
            state.accept_token(token)
        return len(tokens)

    def fill_bitmask(self, row: np.ndarray) -> None:
        if forced := self._forced():
            row[:] = 0
            _allow(row, forced[0])
        elif self._answer and self._phase is not ReasoningPhase.REASONING:
            self._answer.fill_bitmask(row)
            if self._phase is ReasoningPhase.BEFORE:
                _allow(row, self._span.begin)

    def jump_forward_tokens(self) -> list[int]:
        if self._phase is ReasoningPhase.ANSWER and self._answer:
            return self._answer.jump_forward_tokens()
        return self._forced()

    def _forced(self) -> list[int]:
        """Tokens that are forced next: the opening, the end-of-reasoning token at the limit, and the separator."""
        if self._phase is ReasoningPhase.REASONING and self._reasoning_left == 0:
            return [self._span.end]
        if self._phase is ReasoningPhase.OPENING:
            return list(self._span.opening[self._num_forced :])
        return list(self._span.answer[self._num_forced :]) if self._phase is ReasoningPhase.SEPARATOR else []


def make_guide(request: EngineRequest, grammar: Grammar | None) -> Guide | None:
    """Create the guide for a sequence of a request; None if all tokens are always allowed."""
    if isinstance(grammar, ToolCallGrammar):
        return grammar.new_idle_guide(request.stage, make_guide(request, None))
    answer = grammar.new_guide() if grammar else None
    limit, answer_limit = request.sampling.reasoning_max_tokens, request.sampling.response_max_tokens
    if request.reasoning is None or (answer is None and limit is None and answer_limit is None):
        return answer
    return ReasoningGuide(request.reasoning, limit, answer, answer_limit)


def _allow(row: np.ndarray, token: int) -> None:
    """Allow a token in a bitmask."""
    row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
