"""Random prompts of exact length, in token ids or words, the same for the same name and seed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Piece = tuple[int, int]
"""A part of a prompt: its name and its length in tokens. Parts of one name begin with the same text."""

FIRST_ID = 1000  # below are control tokens (all thousand of them in Mistral's Tekken) and single bytes
WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home us move try kind
hand picture again change off play spell air away animal house point page letter mother answer found study still learn
should world high every near add food between own below country plant last school father keep tree never start city
""".split()  # common enough to be one token each where a vocabulary has some ten thousand


def ids(pieces: Iterable[Piece], seed: int, vocab_size: int) -> list[int]:
    """A prompt as token ids from 1000 (half the vocabulary, where it is smaller than 2000) up to ``vocab_size``."""
    return _draw(pieces, seed, min(FIRST_ID, vocab_size // 2), vocab_size)


def words(pieces: Iterable[Piece], seed: int) -> str:
    """A prompt as common English words, about as many tokens as words."""
    return " ".join(WORDS[index] for index in _draw(pieces, seed, 0, len(WORDS)))


def _draw(pieces: Iterable[Piece], seed: int, low: int, high: int) -> list[int]:
    drawn = [np.random.default_rng((seed, name)).integers(low, high, length) for name, length in pieces]
    numbers: list[int] = np.concatenate(drawn).tolist()
    return numbers
