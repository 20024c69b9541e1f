"""Draft tokens looked up in the text so far (prompt lookup decoding, Saxena, 2023)."""

from __future__ import annotations

from ..sequence.sequence import Sequence

MAX_PROMPT = 32_768
"""Last tokens of a prompt that are searched: reading them takes 0.2 s, in which nothing else goes on."""


class NGramDrafter:
    """Drafts what followed the last tokens where they came before.

    Args:
        longest, shortest: last tokens that are looked for; the longest match counts.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        tokens, prompt = sequence.tokens, sequence.prompt_length
        if not sequence.seen_in_prompt:
            self._read(tokens, max(prompt - MAX_PROMPT, 0) + 1, prompt, sequence.seen_in_prompt)
        self._read(tokens, sequence.read, len(tokens), sequence.seen)
        sequence.read = len(tokens)
        for length in self._lengths:
            run = tuple(tokens[-length:])
            if (at := sequence.seen.get(run, sequence.seen_in_prompt.get(run))) is not None:
                guessed: list[int] = []
                for source in range(at, at + most):  # what goes on beyond the end goes on with what is guessed
                    guessed.append(tokens[source] if source < len(tokens) else guessed[source - len(tokens)])
                return guessed
        return []

    def _read(self, tokens: list[int], begin: int, end: int, seen: dict[tuple[int, ...], int]) -> None:
        """Note where what came after each run of tokens begins, from ``begin`` to before ``end``."""
        for at in range(begin, end):
            for length in self._lengths:
                if length <= at:
                    seen[tuple(tokens[at - length : at])] = at
