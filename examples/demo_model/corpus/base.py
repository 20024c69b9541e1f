"""What every skill of the corpus is made of: splits, exchanges, conversations.

A *skill* is a function ``make(rng, split) -> Exchange`` or ``make(rng, split) -> Conversation``. It draws all
randomness from ``rng`` and asks ``split`` which wordings and values it may use, so that the held-out set is
fixed before anything is trained and cannot leak.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Message = dict[str, Any]
"""One chat message in OpenAI's form: ``role``, ``content``, and ``tool_calls`` or ``reasoning_content``."""

HELD_OUT_SHARE = 8
"""One value in this many is held out."""


class Split(enum.Enum):
    """Which half of the world a generator may use."""

    TRAIN = "train"
    HELD_OUT = "held_out"

    def wording(self, rng: Random, wordings: Sequence[T]) -> T:
        """Pick a wording. Every fifth of a list (the 5th, 10th, …) is held out, so a list needs at least five."""
        if len(wordings) < 5:
            raise ValueError("a list of wordings needs at least five, so that one can be held out")
        if self is Split.HELD_OUT:
            return rng.choice(wordings[4::5])
        return rng.choice([wording for i, wording in enumerate(wordings) if i % 5 != 4])

    def owns(self, *value: object) -> bool:
        """Whether a value (operands, a code, a pair of names …) belongs to this split; decided by its hash."""
        digest = hashlib.blake2b("\x1f".join(map(str, value)).encode(), digest_size=4).digest()
        held_out = int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0
        return held_out == (self is Split.HELD_OUT)

    def draw(self, make: Callable[[], T], key: Callable[[T], Sequence[object]] = lambda value: (value,)) -> T:
        """Call ``make`` until it gives a value that this split owns. ``key`` says what of it is hashed."""
        for _ in range(10_000):
            value = make()
            if self.owns(*key(value)):
                return value
        raise ValueError("this split owns none of the values drawn")


class Check(enum.Enum):
    """How an answer is graded against the expected one."""

    EXACT = "exact"  # the same text
    JSON = "json"  # the same JSON value
    CALL = "call"  # the same function called with the same arguments
    THINK = "think"  # a non-empty <think> block, then the same text
    FREE = "free"  # open text (stories): not graded by match


@dataclass(frozen=True)
class Exchange:
    """One question and its answer.

    ``key`` names the held-out unit (a wording with its fact, or the operands); train and held-out keys of a skill
    never meet.
    """

    user: str
    answer: str
    key: str
    check: Check = Check.EXACT


@dataclass(frozen=True)
class Conversation:
    """A whole conversation; its last message is the assistant's and is the one that is graded.

    Every assistant message is trained on.
    """

    messages: list[Message]
    key: str
    check: Check = Check.EXACT
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    skill: str = field(default="", compare=False)


Skill = Callable[[Random, Split], Exchange] | Callable[[Random, Split], Conversation]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


def call(name: str, arguments: dict[str, Any], content: str = "") -> Message:
    """An assistant message that calls one function."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


def one_of(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def is_chinese(rng: Random, share: float = 0.4) -> bool:
    """Draw the language of an example."""
    return rng.random() < share
