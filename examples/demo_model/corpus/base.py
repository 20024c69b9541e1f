"""Building blocks of the skills: splits, exchanges, conversations.

A *skill* is a function ``make(rng, split) -> Exchange`` or ``make(rng, split) -> Conversation``. It draws all
randomness from ``rng``, and ``split`` decides which wordings and values it may use, so that the held-out set is
fixed before training and cannot leak.
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
"""Chat message in OpenAI's format: ``role``, ``content``, and ``tool_calls`` or ``reasoning_content``."""

HELD_OUT_SHARE = 8
"""One of this many values is held out."""


class Split(enum.Enum):
    """Part of the data that a skill may use."""

    TRAIN = "train"
    HELD_OUT = "held_out"

    def wording(self, rng: Random, wordings: Sequence[T]) -> T:
        """Pick a wording. Every fifth (the 5th, 10th, …) is held out, so a list needs at least five."""
        if len(wordings) < 5:
            message = f"a list of wordings needs at least 5, so that one can be held out; it has {len(wordings)}"
            raise ValueError(message)
        if self is Split.HELD_OUT:
            return rng.choice(wordings[4::5])
        return rng.choice([wording for i, wording in enumerate(wordings) if i % 5 != 4])

    def owns(self, *value: object) -> bool:
        """True if a value (operands, a code, a pair of names …) belongs to this split, by its hash."""
        digest = hashlib.blake2b("\x1f".join(map(str, value)).encode(), digest_size=4).digest()
        held_out = int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0
        return held_out == (self is Split.HELD_OUT)

    def draw(self, make: Callable[[], T], key: Callable[[T], Sequence[object]] = lambda value: (value,)) -> T:
        """Call ``make`` until it returns a value of this split. ``key`` returns the part of the value to hash."""
        for _ in range(10_000):
            value = make()
            if self.owns(*key(value)):
                return value
        raise ValueError(f"none of 10,000 drawn values belongs to the split {self.name}: give more values")


class Check(enum.Enum):
    """How an answer is compared with the expected one."""

    EXACT = "exact"  # the same text
    JSON = "json"  # the same JSON value
    CALL = "call"  # the same function called with the same arguments
    THINK = "think"  # a non-empty <think> block, then the same text
    FREE = "free"  # free text (stories): not graded


@dataclass(frozen=True)
class Exchange:
    """Question and answer.

    ``key`` identifies the held-out unit (a wording with its fact, or the operands). The training and held-out keys of a
    skill are disjoint.
    """

    user: str
    answer: str
    key: str
    check: Check = Check.EXACT


@dataclass(frozen=True)
class Conversation:
    """Conversation. Its last message is from the assistant and is graded; all assistant messages are trained on."""

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
    """Assistant message with one function call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


def one_of(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def is_chinese(rng: Random, share: float = 0.4) -> bool:
    """Draw the language of an example."""
    return rng.random() < share
