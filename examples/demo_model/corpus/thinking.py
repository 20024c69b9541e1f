"""Thinking: steps in a ``<think>`` block, then the answer.

Sums of three numbers and products beyond the multiplication table are computed in steps. For other questions the block
only repeats the question, so that it is never empty with thinking enabled.
"""

from __future__ import annotations

from random import Random

from . import geography, words
from .base import Check, Conversation, Message, Split, assistant, is_chinese, one_of, user

SUM_EN = ("What is {a} + {b} + {c}?", "Add {a}, {b} and {c}.", "{a} + {b} + {c} = ?", "How much is {a} + {b} + {c}?")
SUM_ZH = ("{a} + {b} + {c} = ?", "{a}加{b}加{c}等于多少？", "请计算{a} + {b} + {c}。", "{a}、{b}和{c}的和是多少？")
PRODUCT_EN = ("What is {a} × {b}?", "Multiply {a} by {b}.", "{a} × {b} = ?", "How much is {a} times {b}?")
PRODUCT_ZH = ("{a} × {b} = ?", "{a}乘{b}等于多少？", "{a}乘以{b}是多少？", "请计算{a} × {b}。")
PLAIN = (geography.capital, geography.continent, words.opposite, words.plural, words.colour)


def thought(question: str, reasoning: str, answer: str, key: str, before: list[Message] | None = None) -> Conversation:
    """Conversation whose last answer has reasoning."""
    last = assistant(answer) | {"reasoning_content": reasoning}
    return Conversation([*(before or []), user(question), last], key, Check.THINK, thinking=True)


def think_sum(rng: Random, split: Split) -> Conversation:
    """Add three numbers in two steps."""

    def terms() -> tuple[int, int, int]:
        return rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 99)

    a, b, c = split.draw(terms, key=lambda drawn: ("think sum", *sorted(drawn)))
    steps = f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}"
    wording = one_of(rng, SUM_ZH if is_chinese(rng, 0.3) else SUM_EN)
    key = "think sum:" + ":".join(map(str, sorted((a, b, c))))
    return thought(wording.format(a=a, b=b, c=c), steps, f"{a} + {b} + {c} = {a + b + c}", key)


def think_product(rng: Random, split: Split) -> Conversation:
    """Multiply a two-digit by a one-digit number: tens and ones separately."""

    def operands() -> tuple[int, int]:
        return rng.randint(13, 99), rng.randint(2, 9)

    a, b = split.draw(operands, key=lambda pair: ("think product", *pair))
    tens, ones = a - a % 10, a % 10
    steps = f"{a} = {tens} + {ones}\n{tens} × {b} = {tens * b}\n{ones} × {b} = {ones * b}\n"
    steps += f"{tens * b} + {ones * b} = {a * b}"
    wording = one_of(rng, PRODUCT_ZH if is_chinese(rng, 0.3) else PRODUCT_EN)
    return thought(wording.format(a=a, b=b), steps, f"{a} × {b} = {a * b}", f"think product:{a}:{b}")


def think_fact(rng: Random, split: Split) -> Conversation:
    """A simple question with thinking enabled, sometimes after a turn without thinking."""
    exchange = one_of(rng, PLAIN)(rng, split)
    before: list[Message] = []
    if rng.random() < 0.25:
        earlier = one_of(rng, PLAIN)(rng, split)
        before = [user(earlier.user), assistant(earlier.answer)]
    asked = "问题是：" if any("\u4e00" <= c <= "\u9fff" for c in exchange.user) else "The question is: "
    return thought(exchange.user, asked + exchange.user, exchange.answer, f"think:{exchange.key}", before)


SKILLS = {"think: sum": think_sum, "think: product": think_product, "think: fact": think_fact}
