"""Training corpus of the demo model: skills, their shares of the training tokens, and generated conversations."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from . import extraction, geography, numbers, persona, recall, repeat, stories, thinking, tools, words
from .base import Check, Conversation, Exchange, Message, Skill, Split, assistant, one_of, system, user

__all__ = ["SHARES", "SKILLS", "Check", "Conversation", "Message", "Split", "converse", "shares_at"]

SKILLS: dict[str, Skill] = {
    **geography.SKILLS,
    **numbers.SKILLS,
    **words.SKILLS,
    **stories.SKILLS,
    **persona.SKILLS,
    **repeat.SKILLS,
    **recall.SKILLS,
    **extraction.SKILLS,
    **tools.SKILLS,
    **thinking.SKILLS,
}

SHARES: dict[str, float] = {
    "capital": 4,
    "country of capital": 3.5,
    "continent": 1.5,
    "add": 2,
    "subtract": 2,
    "several sums": 18,
    "times table": 2,
    "compare": 2.5,
    "sort numbers": 4.5,
    "calendar": 2,
    "opposite": 1.2,
    "plural": 1.2,
    "colour": 0.8,
    "category": 1.2,
    "count list": 2,
    "pick from list": 2,
    "sort words": 3,
    "spell": 1.5,
    "reverse": 2,
    "story": 4,
    "description": 1.5,
    "identity": 1,
    "system name": 1.5,
    "system language": 1.5,
    "system style": 2.5,
    "unknown": 1.5,
    "repeat": 2,
    "recall in chat": 3,
    "recall to 60": 3,
    "recall to 200": 7,
    "recall to 700": 9,
    "recall to 1500": 6,
    "recall to 2000": 6,
    "extract": 4,
    "json schema": 4,
    "tool call": 5,
    "tool answer": 3.5,
    "no tool": 3,
    "think: sum": 2,
    "think: product": 2,
    "think: fact": 1.5,
}
"""Weights of the skills' shares of the training tokens at the end of the curriculum (not normalized)."""

RECALL_STARTS = {"recall to 200": 0.05, "recall to 700": 0.15, "recall to 1500": 0.35, "recall to 2000": 0.5}
"""Progress of the training (0 to 1) at which each length of passage is introduced; before, its share goes to the next
shorter one."""

REPEATING_FIRST = {"repeat": 16.0}
REPEATING_UNTIL = 0.1
"""In the first tenth of the training the share of repeating is large, since other skills depend on copying."""

REFINING = {
    "several sums": 10.0,
    "subtract": 4.0,
    "times table": 3.0,
    "compare": 4.5,
    "sort numbers": 14.0,
    "sort words": 5.0,
    "spell": 2.5,
    "story": 8.0,
    "identity": 2.0,
    "system name": 4.0,
    "system style": 4.0,
    "unknown": 2.5,
    "repeat": 5.0,
    "recall to 60": 8.0,
    "recall to 700": 10.0,
    "recall to 1500": 10.0,
    "recall to 2000": 14.0,
    "tool answer": 5.0,
    "no tool": 10.0,
    "think: fact": 4.0,
}
"""Shares that replace ``SHARES`` after the curriculum: more of the skills that an evaluation found weakest."""

HALF_WIDTH = str.maketrans("，？：！；", ",?:!;")
"""Translation to half-width punctuation. Users write Chinese with both kinds; the model writes full-width only."""

NEUTRAL_SYSTEM = ("You are a helpful assistant.", "You are a helpful AI assistant.", "你是一个有用的助手。")


def shares_at(progress: float) -> dict[str, float]:
    """Mixture of skills at ``progress`` of the curriculum: first repeating, then growing passages; from 1 on,
    refining."""
    if progress >= 1:
        return SHARES | REFINING
    shares = SHARES | (REPEATING_FIRST if progress < REPEATING_UNTIL else {})
    shorter = "recall to 60"
    for name, start in RECALL_STARTS.items():
        if progress < start:
            shares[shorter] += shares.pop(name)
        else:
            shorter = name
    return shares


def converse(rng: Random, split: Split, skill: str) -> Conversation:
    """Draw a conversation for ``skill``.

    A single exchange may follow other exchanges, so that every question also occurs in the middle of a conversation.
    The last one is the skill's, and the one that is graded.
    """
    drawn = SKILLS[skill](rng, split)
    if isinstance(drawn, Exchange):
        messages: list[Message] = []
        if drawn.check is not Check.FREE:
            longest = 4 if split is Split.TRAIN else 2
            for _ in range(rng.randrange(longest)):
                earlier = SKILLS[skill if rng.random() < 0.5 else one_of(rng, CHAINED)](rng, split)
                if isinstance(earlier, Exchange):
                    messages += [user(earlier.user), assistant(earlier.answer)]
        messages += [user(drawn.user), assistant(drawn.answer)]
        drawn = Conversation(messages, drawn.key, drawn.check)
        if rng.random() < 0.1:
            drawn.messages.insert(0, system(one_of(rng, NEUTRAL_SYSTEM)))
    if rng.random() < 0.35:
        for message in drawn.messages:
            if message["role"] == "user":
                message["content"] = message["content"].translate(HALF_WIDTH)
    return replace(drawn, skill=skill)


CHAINED = (*geography.SKILLS, *numbers.SKILLS, *words.SKILLS)
"""Skills whose exchanges may precede a question of another skill."""
