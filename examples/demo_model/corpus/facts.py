"""Questions about a fixed table of facts, where not the facts but the wordings are held out."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from .base import Exchange, Split

CHINESE_SHARE = 0.45


def capitalised(text: str) -> str:
    """The text with a capital first letter, the rest untouched."""
    return text[:1].upper() + text[1:]


def ask(rng: Random, split: Split, kind: str, wordings: Sequence[str], answer: str, **slots: str) -> Exchange:
    """Put a fact into one of the wordings. A slot ``x`` can also be had with a capital first letter, as ``X``."""
    wording = split.wording(rng, wordings)
    capitals = {name.capitalize(): capitalised(value) for name, value in slots.items()}
    return Exchange(wording.format(**slots, **capitals), answer, f"{kind}:{wording}:{answer}")
