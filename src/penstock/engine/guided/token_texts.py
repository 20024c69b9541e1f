"""Texts of a vocabulary's tokens, and tokens of texts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .added_tokens import AddedTokens


class TokenTexts:
    """Texts of a vocabulary's tokens, as bytes.

    Args:
        tokenizer: llguidance's ``LLTokenizer``.
    """

    def __init__(self, tokenizer: Any, added_tokens: AddedTokens) -> None:
        self._tokenizer = tokenizer
        self._added_tokens = added_tokens
        self.all: list[bytes] = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        """Text of each token. The texts of added tokens are included."""
        self._special = frozenset(added_tokens.tokens[text] for text in added_tokens.special)
        self.markers = lru_cache(16)(self._markers)
        """``MarkerTokens`` of a tuple of markers; cached."""

    def tokenize(self, text: bytes) -> list[int]:
        """Tokens of a text that contains no added tokens. The tokens may differ from those of the model's tokenizer."""
        tokens: list[int] = self._tokenizer.tokenize_bytes(text)
        return tokens

    def tokenize_marker(self, marker: str) -> list[int]:
        """Tokens of a text that may contain added tokens."""
        parts = self._added_tokens.split(marker)
        return [
            token for part in parts for token in ([part] if isinstance(part, int) else self.tokenize(part.encode()))
        ]

    def _markers(self, markers: tuple[str, ...]) -> MarkerTokens:
        texts = list(self.all)
        for token in self._special:
            if not any(texts[token].decode() in marker for marker in markers):
                texts[token] = b""
        return MarkerTokens(texts, markers)


class MarkerTokens:
    """Tokens in which the texts ``markers`` may begin.

    Args:
        texts: text of each token; empty for special tokens that are in no marker.
    """

    def __init__(self, texts: list[bytes], markers: tuple[str, ...]) -> None:
        self.texts = texts
        self._markers = [marker.encode() for marker in markers]
        firsts = {marker[:1] for marker in self._markers}
        begins = [token for token, text in enumerate(texts) if any(first in text for first in firsts)]
        self.starters = frozenset(token for token in begins if self._has_start(texts[token]))
        """Tokens that contain a marker, or end with a prefix of one."""

    def _has_start(self, text: bytes) -> bool:
        return any(marker in text for marker in self._markers) or self.partial(text) > 0

    def partial(self, text: bytes) -> int:
        """Length of the longest suffix of a text that is a proper prefix of a marker."""
        longest = 0
        for marker in self._markers:
            for length in range(min(len(text), len(marker) - 1), longest, -1):
                if marker.startswith(text[-length:]):
                    longest = length
                    break
        return longest
