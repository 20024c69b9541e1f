"""A thought before the answer: of any tokens, ended in time, and no part of the form that the answer has."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from penstock.core import EngineRequest, Failure, ReasoningSpan

from .guide import Grammar, Guide


class Stage(Enum):
    BEFORE = auto()  # the first token begins the thought, or the answer
    WITHIN = auto()
    BETWEEN = auto()  # the thought has ended, and what leads to the answer is written
    ANSWER = auto()


class Thinking(Guide):
    """A sequence's way through its thought, and then through the form of its answer.

    Args:
        limit: tokens after which the thought is ended; None is any.
        form: of the answer; None is any.
        answer_limit: tokens of the answer; None is any.
    """

    def __init__(
        self, thought: ReasoningSpan, limit: int | None, form: Guide | None, answer_limit: int | None = None
    ) -> None:
        self._thought = thought
        self._left = limit
        self._form = form
        self._answer_left = answer_limit
        self._stage = Stage.WITHIN if thought.begun else Stage.BEFORE
        self._written = 0
        """Of the tokens between thought and answer."""

    def copy(self) -> Thinking:
        form = self._form.copy() if self._form else None
        twin = Thinking(self._thought, self._left, form, self._answer_left)
        twin._stage, twin._written = self._stage, self._written
        return twin

    @property
    def free(self) -> bool:
        return not self._own_forced() and (self._form is None or self._stage is Stage.WITHIN)

    def replace_eos(self, end: int) -> int:
        """A model that would say no more has thought enough: the answer still has its form."""
        return self._thought.end if self._form and self._stage is Stage.WITHIN else end

    def take(self, token: int) -> bool:
        thought = self._thought
        if self._stage is Stage.BEFORE:
            self._stage = Stage.WITHIN if token == thought.begin else Stage.ANSWER
            if self._stage is Stage.WITHIN:
                return True
        if self._stage is Stage.WITHIN:
            if token == thought.end:
                leads = thought.answer and (self._form or self._left == 0)
                self._stage = Stage.BETWEEN if leads else Stage.ANSWER
            elif self._left:
                self._left -= 1
            return True
        if self._stage is Stage.BETWEEN:
            self._written += 1
            if self._written == len(thought.answer):
                self._stage = Stage.ANSWER
            return True
        if self._answer_left:
            self._answer_left -= 1
        return self._form is None or self._form.take(token)

    @property
    def failure(self) -> Failure | None:
        return self._form.failure if self._form else None

    @property
    def complete(self) -> bool:
        return self._stage is Stage.ANSWER and self._form is not None and self._form.complete

    @property
    def spent(self) -> bool:
        return self._answer_left == 0

    def allows(self, tokens: list[int]) -> int:
        later = self.copy()
        for i, token in enumerate(tokens):
            forced = later._own_forced()
            begins = later._stage is Stage.BEFORE and token == self._thought.begin
            if later._form and not (forced or later.free or begins):
                return i + later._form.allows(tokens[i:])
            if forced and token != forced[0]:
                return i
            later.take(token)
        return len(tokens)

    def fill(self, row: np.ndarray) -> None:
        if forced := self._own_forced():
            row[:] = 0
            _allow(row, forced[0])
        elif self._form and self._stage is not Stage.WITHIN:
            self._form.fill(row)
            if self._stage is Stage.BEFORE:
                _allow(row, self._thought.begin)

    def forced(self) -> list[int]:
        if self._stage is Stage.ANSWER and self._form:
            return self._form.forced()
        return self._own_forced()

    def _own_forced(self) -> list[int]:
        if self._stage is Stage.WITHIN and self._left == 0:
            return [self._thought.end]
        return list(self._thought.answer[self._written :]) if self._stage is Stage.BETWEEN else []


def guide_of(request: EngineRequest, grammar: Grammar | None) -> Guide | None:
    """What says which tokens may come for a request; None where all may from the first to the last."""
    form = grammar.begin() if grammar else None
    limit, answer_limit = request.sampling.reasoning_max_tokens, request.sampling.response_max_tokens
    if request.thought is None or (form is None and limit is None and answer_limit is None):
        return form
    return Thinking(request.thought, limit, form, answer_limit)


def _allow(row: np.ndarray, token: int) -> None:
    row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
