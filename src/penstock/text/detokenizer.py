"""Incremental detokenization: token ids to text, without splitting characters."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence


class Detokenizer:
    """Decodes one sequence as it grows.

    Args:
        vocabulary: bytes of each token id (``vocabulary.token_bytes``).
        skipped: token ids that add no text, usually the special tokens.
    """

    def __init__(self, vocabulary: Sequence[bytes], skipped: Collection[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int], last: bool = False) -> str:
        """Return the text that these tokens complete; with ``last`` an incomplete character becomes U+FFFD.

        Ids beyond the vocabulary, which models with padded embeddings can sample, add nothing.
        """
        size = len(self._vocabulary)
        new = b"".join(self._vocabulary[i] for i in token_ids if i < size and i not in self._skipped)
        return self._decoder.decode(new, last)
