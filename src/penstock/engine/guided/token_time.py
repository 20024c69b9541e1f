"""How long the grammar of one sequence may take, which holds up the sequences that are computed with it."""

from __future__ import annotations

import time

MAX_TOKEN_TIME = 0.25
"""Seconds of processor time for one token of one sequence."""
TIME_PER_TOKEN = 0.01
"""Seconds that a token may take on average."""
MAX_SAVED_TIME = 1.0
"""Seconds that a sequence may have left of earlier tokens, and has before the first."""


class TokenTime:
    """Measures the processor time of one sequence's grammar::

    with token_time: ...

    A grammar that takes too long takes longer with every token, as a rule.
    """

    __slots__ = ("_left", "_started", "is_exceeded")

    def __init__(self) -> None:
        self._left = MAX_SAVED_TIME
        self._started = 0.0
        self.is_exceeded = False

    def copy(self) -> TokenTime:
        copy = TokenTime()
        copy._left, copy.is_exceeded = self._left, self.is_exceeded
        return copy

    def add_token(self) -> None:
        """Allow for one more token."""
        self._left = min(self._left + TIME_PER_TOKEN, MAX_SAVED_TIME)

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *error: object) -> None:
        spent = time.thread_time() - self._started
        self._left -= spent
        if spent > MAX_TOKEN_TIME or self._left < 0:
            self.is_exceeded = True
