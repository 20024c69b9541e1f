"""Splits tokens of a transcript into words, like OpenAI's implementation of Whisper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Codes of languages written without spaces between words; each character counts as a word."""
OPENING = "\"'“¡¿([{-"
"""Punctuation that is joined to the following word."""
CLOSING = "\"'.。,，!！?？:：”)]}、"
"""Punctuation that is joined to the preceding word."""
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
INCOMPLETE = "\ufffd"
"""Replacement character of incomplete UTF-8."""


class TokenWord(NamedTuple):
    """Word, and the index range of its tokens."""

    text: str
    """Text including a leading space."""
    first: int
    """Index of the word's first token."""
    end: int
    """Index after the word's last token."""


def split_words(token_ids: Sequence[int], decode: Callable[[list[int]], str], language: str) -> list[TokenWord]:
    """Split tokens into words.

    Args:
        token_ids: text tokens, without special tokens and timestamps.
        decode: decodes token ids to text.
        language: code of the language; empty for an English-only model.
    """
    words = _characters(list(token_ids), decode)
    if language not in WITHOUT_SPACES:
        words = _join_at_spaces(words)
    return _join_closing(_join_opening(words))


def _characters(token_ids: list[int], decode: Callable[[list[int]], str]) -> list[TokenWord]:
    """Shortest runs of tokens that decode to complete characters. Incomplete characters at the end are left out."""
    whole, words, first, length = decode(token_ids), list[TokenWord](), 0, 0
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[first:end])
        position = length + text.find(INCOMPLETE)
        if INCOMPLETE not in text or position >= len(whole) or whole[position] == INCOMPLETE:
            words.append(TokenWord(text, first, end))
            first, length = end, length + len(text)
    return words


def _join_at_spaces(words: list[TokenWord]) -> list[TokenWord]:
    """Join items that do not begin with a space and are not punctuation to the preceding word."""
    joined: list[TokenWord] = []
    for word in words:
        if joined and not word.text.startswith(" ") and word.text.strip() not in PUNCTUATION:
            joined[-1] = _join(joined[-1], word)
        else:
            joined.append(word)
    return joined


def _join_opening(words: list[TokenWord]) -> list[TokenWord]:
    joined: list[TokenWord] = []  # in reverse order
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in OPENING:
            joined[-1] = _join(word, joined[-1])
        else:
            joined.append(word)
    return joined[::-1]


def _join_closing(words: list[TokenWord]) -> list[TokenWord]:
    joined: list[TokenWord] = []
    for word in words:
        if joined and not joined[-1].text.endswith(" ") and word.text in CLOSING:
            joined[-1] = _join(joined[-1], word)
        else:
            joined.append(word)
    return joined


def _join(one: TokenWord, other: TokenWord) -> TokenWord:
    return TokenWord(one.text + other.text, one.first, other.end)
