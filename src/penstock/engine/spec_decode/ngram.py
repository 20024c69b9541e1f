"""N-gram drafter: finds drafts in the previous tokens (prompt lookup decoding, Saxena, 2023)."""

from __future__ import annotations

from ..sequence.sequence import Sequence

MAX_PROMPT = 32_768
"""Number of trailing prompt tokens that are searched. Indexing this number takes 0.2 s, which delays the next step."""


class NGramDrafter:
    """Drafts the tokens that followed the last occurrence of the sequence's trailing n-gram.

    Args:
        max_n, min_n: range of n-gram lengths; the longest n-gram that occurs is used.
    """

    def __init__(self, max_n: int, min_n: int) -> None:
        self._lengths = range(max_n, min_n - 1, -1)

    def propose(self, sequence: Sequence, max_len: int) -> list[int]:
        """Draft at most ``max_len`` tokens; empty if no trailing n-gram occurs earlier in the sequence."""
        tokens, prompt = sequence.tokens, sequence.prompt_length
        if not sequence.prompt_ngrams:
            self._index(tokens, max(prompt - MAX_PROMPT, 0) + 1, prompt, sequence.prompt_ngrams)
        self._index(tokens, sequence.ngrams_end, len(tokens), sequence.ngrams)
        sequence.ngrams_end = len(tokens)
        for length in self._lengths:
            ngram = tuple(tokens[-length:])
            if (at := sequence.ngrams.get(ngram, sequence.prompt_ngrams.get(ngram))) is not None:
                draft: list[int] = []
                for source in range(at, at + max_len):  # after the last token, copy from the draft
                    draft.append(tokens[source] if source < len(tokens) else draft[source - len(tokens)])
                return draft
        return []

    def _index(self, tokens: list[int], begin: int, end: int, ngrams: dict[tuple[int, ...], int]) -> None:
        """Add the n-grams that end before each position from ``begin`` to ``end - 1`` to ``ngrams``."""
        for at in range(begin, end):
            for length in self._lengths:
                if length <= at:
                    ngrams[tuple(tokens[at - length : at])] = at
