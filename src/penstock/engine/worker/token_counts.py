"""Token counts of a row, for penalties. The counts are updated incrementally: each step counts only new tokens."""

from __future__ import annotations

import numpy as np


class TokenCounts:
    """Number of occurrences of each token in a row: in prompt and output together, and in the output alone.

    Args:
        prompt_length: number of tokens before the output.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._counted: list[int] = []
        self._all = _Table()
        self._output = _Table()

    def copy(self) -> TokenCounts:
        """Copy the counts, for a beam that continues from this row."""
        copy = TokenCounts(self._prompt_length)
        copy._counted, copy._all, copy._output = self._counted.copy(), self._all.copy(), self._output.copy()
        return copy

    def rewind(self, length: int) -> None:
        """Remove all but the first ``length`` tokens from the counts. Required if the tokens after them were replaced,
        or were draft tokens."""
        while len(self._counted) > length:
            token = self._counted.pop()
            self._all.remove(token)
            if len(self._counted) >= self._prompt_length:
                self._output.remove(token)

    def count(self, tokens: np.ndarray, length: int) -> None:
        """Update the counts to the first ``length`` tokens.

        Args:
            tokens: the row's tokens, ``[at least length]`` int32. Tokens counted by an earlier call must not have
                changed, unless ``rewind`` has removed them.
        """
        self.rewind(length)
        done = len(self._counted)
        for at, token in enumerate(tokens[done:length].tolist(), done):
            self._all.add(token)
            if at >= self._prompt_length:
                self._output.add(token)
            self._counted.append(token)

    @property
    def token_ids(self) -> np.ndarray:
        """Distinct tokens of prompt and output, ``[tokens]`` int64."""
        return self._all.token_ids

    @property
    def output_ids(self) -> np.ndarray:
        """Distinct tokens of the output, ``[output tokens]`` int64."""
        return self._output.token_ids

    @property
    def output_counts(self) -> np.ndarray:
        """Number of occurrences of each of ``output_ids`` in the output, ``[output tokens]`` int64."""
        return self._output.counts


class _Table:
    """Distinct tokens in order of first occurrence, and their counts."""

    def __init__(self) -> None:
        self._columns: dict[int, int] = {}
        """Token → its column in ``_data``."""
        self._data = np.zeros((2, 64), np.int64)
        """Token and count of each column. Columns beyond ``len(_columns)`` are unused."""

    def copy(self) -> _Table:
        copy = _Table()
        copy._columns, copy._data = self._columns.copy(), self._data.copy()
        return copy

    def add(self, token: int) -> None:
        column = self._columns.setdefault(token, len(self._columns))
        if column == self._data.shape[1]:
            self._data = np.concatenate((self._data, np.zeros_like(self._data)), 1)
        self._data[0, column] = token
        self._data[1, column] += 1

    def remove(self, token: int) -> None:
        """Undo the last ``add``, whose argument was ``token``."""
        column = self._columns[token]
        self._data[1, column] -= 1
        if not self._data[1, column]:  # the token was added last, so it has the last column
            del self._columns[token]

    @property
    def token_ids(self) -> np.ndarray:
        return self._data[0, : len(self._columns)]

    @property
    def counts(self) -> np.ndarray:
        return self._data[1, : len(self._columns)]
