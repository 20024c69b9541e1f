"""Words of a transcript's tokens, as OpenAI's implementation of Whisper makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Codes of languages in which each character is a word, as words are written without spaces between them."""
OPENING = "\"'“¡¿([{-"
"""Punctuation that belongs to the word after it."""
CLOSING = "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word before it."""
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
INCOMPLETE = "\ufffd"
"""Character to which incomplete UTF-8 is decoded."""


class TokenWord(NamedTuple):
    """A word, and which tokens it is made of."""

    text: str
    """With the space before it."""
    first: int
    """Index of its first token."""
    end: int
    """Index after its last token."""


def split_words(token_ids: Sequence[int], decode: Callable[[list[int]], str], language: str) -> list[TokenWord]:
    """Words of text.

    Args:
        token_ids: without special tokens and times.
        decode: tokens to text.
        language: code; empty for a model that has only one.
    """
    words = _characters(list(token_ids), decode)
    if language not in WITHOUT_SPACES:
        words = _join_at_spaces(words)
    return _join_closing(_join_opening(words))


def _characters(token_ids: list[int], decode: Callable[[list[int]], str]) -> list[TokenWord]:
    """The shortest runs of tokens that are whole characters. Tokens at the end that are none are left out."""
    whole, words, first, length = decode(token_ids), list[TokenWord](), 0, 0
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[first:end])
        place = length + text.find(INCOMPLETE)
        if INCOMPLETE not in text or place >= len(whole) or whole[place] == INCOMPLETE:
            words.append(TokenWord(text, first, end))
            first, length = end, length + len(text)
    return words


def _join_at_spaces(words: list[TokenWord]) -> list[TokenWord]:
    """Join what is neither punctuation nor begins with a space to the word before it."""
    joined: list[TokenWord] = []
    for word in words:
        if joined and not word.text.startswith(" ") and word.text.strip() not in PUNCTUATION:
            joined[-1] = _join(joined[-1], word)
        else:
            joined.append(word)
    return joined


def _join_opening(words: list[TokenWord]) -> list[TokenWord]:
    joined: list[TokenWord] = []  # from the last word to the first
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
