"""Random prompts of a given length, as token ids or text, determined by names and a seed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Part = tuple[int, int]
"""Part of a prompt: name, and length in tokens. Parts of the same name begin with the same text."""

FIRST_ID = 1000  # smaller ids are control tokens (the first thousand in Mistral's Tekken) and single bytes
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
""".split()  # common words, which are single tokens in vocabularies of some ten thousand tokens


def token_ids(parts: Iterable[Part], seed: int, vocab_size: int) -> list[int]:
    """A prompt as token ids from 1000 (or half of ``vocab_size``, if that is less) to ``vocab_size - 1``."""
    return _draw(parts, seed, min(FIRST_ID, vocab_size // 2), vocab_size)


def text(parts: Iterable[Part], seed: int) -> str:
    """A prompt of common English words, about one per token."""
    return " ".join(WORDS[index] for index in _draw(parts, seed, 0, len(WORDS)))


def _draw(parts: Iterable[Part], seed: int, low: int, high: int) -> list[int]:
    drawn = [np.random.default_rng((seed, name)).integers(low, high, length) for name, length in parts]
    numbers: list[int] = np.concatenate(drawn).tolist()
    return numbers
