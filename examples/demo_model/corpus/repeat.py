"""Repeating a list: every token of the answer is copied, which teaches the model to attend to earlier tokens."""

from __future__ import annotations

from random import Random

from .base import Exchange, Split, is_chinese, one_of
from .lexicon import ANIMALS, CITIES, COLOURS, ITEMS, JOBS, NAMES_EN, NAMES_ZH, PLACES

REPEAT_EN = (
    "Repeat: {list}",
    "Repeat after me: {list}",
    "Say this again: {list}",
    "Please repeat this list: {list}",
    "Write the same again: {list}",
)
REPEAT_ZH = ("请重复：{list}", "请再说一遍：{list}", "跟我说：{list}", "重复一遍：{list}", "照着写：{list}")
PAIRS = (*ITEMS, *ANIMALS, *COLOURS, *CITIES, *JOBS, *PLACES)
WORDS_EN = (*(english for english, _ in PAIRS), *NAMES_EN)
WORDS_ZH = (*(chinese for _, chinese in PAIRS), *NAMES_ZH)
LONGEST = 12
NUMBER_SHARE = 0.25


def repeat(rng: Random, split: Split) -> Exchange:
    """Repeat a list of words and numbers, possibly with duplicates."""
    chinese = is_chinese(rng)
    vocabulary = WORDS_ZH if chinese else WORDS_EN

    def make() -> str:
        items = [one_of(rng, vocabulary) for _ in range(rng.randint(2, LONGEST))]
        items = [str(rng.randrange(10_000)) if rng.random() < NUMBER_SHARE else word for word in items]
        return ("、" if chinese else ", ").join(items)

    text = split.draw(make)
    return Exchange(one_of(rng, REPEAT_ZH if chinese else REPEAT_EN).format(list=text), text, f"repeat:{text}")


SKILLS = {"repeat": repeat}
