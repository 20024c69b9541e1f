"""Which tokens a sequence has, and how often: kept from step to step, as penalties are of each token that there is."""

from __future__ import annotations

from typing import Self

import numpy as np

from ..scheduling.sequence import Sequence


class TokenCounts:
    """Counts of the tokens of one list, which only grows.

    Args:
        tokens: of the sequence.
        prompt_length: tokens before its output.
    """

    def __init__(self, tokens: list[int], prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self.tokens = tokens
        self._read = 0
        self._every = _Table()
        self._output = _Table()

    def of(self, tokens: list[int]) -> Self:
        """Of another list, which begins with all that was counted here."""
        other = type(self)(tokens, self._prompt_length)
        other._read, other._every, other._output = self._read, self._every.copy(), self._output.copy()
        return other

    def catch_up(self) -> None:
        """Count the tokens that have come since."""
        for at in range(self._read, len(self.tokens)):
            self._every.add(self.tokens[at])
            if at >= self._prompt_length:
                self._output.add(self.tokens[at])
        self._read = len(self.tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """Each token of prompt and output once, ``[distinct]`` int64."""
        return self._every.token_ids

    @property
    def output_ids(self) -> np.ndarray:
        """Each token of the output once, ``[distinct]`` int64."""
        return self._output.token_ids

    @property
    def output_times(self) -> np.ndarray:
        """How often these came, ``[distinct]`` int64."""
        return self._output.times


class _Table:
    """Distinct tokens in the order in which they came first, and how often they came."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._held = np.zeros((2, 64), np.int64)

    def copy(self) -> _Table:
        twin = _Table()
        twin._places, twin._held = self._places.copy(), self._held.copy()
        return twin

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == self._held.shape[1]:
            self._held = np.concatenate((self._held, np.zeros_like(self._held)), 1)
        self._held[0, place] = token
        self._held[1, place] += 1

    @property
    def token_ids(self) -> np.ndarray:
        return self._held[0, : len(self._places)]

    @property
    def times(self) -> np.ndarray:
        return self._held[1, : len(self._places)]


def counts_of(sequence: Sequence) -> TokenCounts:
    """Counts of all tokens that a sequence has now."""
    counts = sequence.counts
    if counts is None:
        counts = TokenCounts(sequence.tokens, sequence.prompt_length)
    elif counts.tokens is not sequence.tokens:  # those of what it goes on from: a beam, or itself before guesses
        counts = counts.of(sequence.tokens)
    sequence.counts = counts
    counts.catch_up()
    return counts
