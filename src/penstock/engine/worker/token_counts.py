"""How often a row has each token, for penalties: kept from step to step, so that a step costs only its new tokens."""

from __future__ import annotations

import numpy as np


class TokenCounts:
    """Counts of a row's leading tokens.

    Args:
        prompt_length: tokens before the output.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._counted: list[int] = []
        self._all = _Table()
        self._output = _Table()

    def copy(self) -> TokenCounts:
        """For a beam that goes on from this one."""
        twin = TokenCounts(self._prompt_length)
        twin._counted, twin._all, twin._output = self._counted.copy(), self._all.copy(), self._output.copy()
        return twin

    def rewind(self, length: int) -> None:
        """Uncount all but the first ``length`` tokens, as drafts that were not accepted."""
        while len(self._counted) > length:
            token = self._counted.pop()
            self._all.remove(token)
            if len(self._counted) >= self._prompt_length:
                self._output.remove(token)

    def count(self, tokens: np.ndarray, length: int) -> None:
        """Count the first ``length`` of ``tokens``, of which those that are counted have not changed."""
        self.rewind(length)
        done = len(self._counted)
        for at, token in enumerate(tokens[done:length].tolist(), done):
            self._all.add(token)
            if at >= self._prompt_length:
                self._output.add(token)
            self._counted.append(token)

    @property
    def token_ids(self) -> np.ndarray:
        """Each token of prompt and output once, ``[distinct]`` int64."""
        return self._all.token_ids

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

    def remove(self, token: int) -> None:
        """The token that was added last."""
        place = self._places[token]
        self._held[1, place] -= 1
        if not self._held[1, place]:  # then it was the last to come first
            del self._places[token]

    @property
    def token_ids(self) -> np.ndarray:
        return self._held[0, : len(self._places)]

    @property
    def times(self) -> np.ndarray:
        return self._held[1, : len(self._places)]
