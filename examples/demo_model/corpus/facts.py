"""Questions about a fixed table of facts. Wordings are held out, not facts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from .base import Exchange, Split

CHINESE_SHARE = 0.45


def capitalised(text: str) -> str:
    """Capitalize the first letter only."""
    return text[:1].upper() + text[1:]


def ask(rng: Random, split: Split, kind: str, wordings: Sequence[str], answer: str, **slots: str) -> Exchange:
    """Insert a fact into one of the wordings. The slot ``X`` is the slot ``x`` with a capital first letter."""
    wording = split.wording(rng, wordings)
    capitals = {name.capitalize(): capitalised(value) for name, value in slots.items()}
    return Exchange(wording.format(**slots, **capitals), answer, f"{kind}:{wording}:{answer}")
