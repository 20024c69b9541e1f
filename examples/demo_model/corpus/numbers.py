"""Numbers: sums and differences of up to three digits, the multiplication table, comparing and sorting.

Operands are held out, except for the multiplication table, whose wordings are held out. Sums need many examples, so
one question may ask for several sums (``several``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .base import Exchange, Skill, Split, is_chinese, one_of

ADD_EN = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Please calculate {a} + {b}.",
)
ADD_ZH = ("{a} + {b} = ?", "{a}加{b}等于多少？", "请计算{a} + {b}。", "{a}与{b}的和是多少？", "{a} + {b}是多少？")
SUBTRACT_EN = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "How much is {a} minus {b}?",
    "What is {a} minus {b}?",
    "Please calculate {a} - {b}.",
)
SUBTRACT_ZH = ("{a} - {b} = ?", "{a}减{b}等于多少？", "请计算{a} - {b}。", "{a}减去{b}是多少？", "{a} - {b}是多少？")
TIMES_EN = (
    "What is {a} × {b}?",
    "{a} × {b} = ?",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
    "Please calculate {a} × {b}.",
    "Tell me {a} × {b}.",
    "{a} times {b}?",
    "What is {a} * {b}?",
    "How much is {a} * {b}?",
    "I need {a} × {b}.",
    "How much is {a} × {b}?",
    "Calculate {a} times {b}.",
    "{a} * {b}",
    "Please tell me {a} × {b}.",
)
TIMES_ZH = (
    "{a} × {b} = ?",
    "{a}乘{b}等于多少？",
    "{a}乘以{b}是多少？",
    "请计算{a} × {b}。",
    "{a} × {b}等于多少？",
    "请问{a}乘{b}是多少？",
    "计算{a}乘以{b}。",
    "{a} × {b}是多少？",
    "请计算{a}乘{b}。",
    "请问{a}乘以{b}等于多少？",
)
LARGER_EN = ("Which is larger, {list}?", "Which number is the largest: {list}?", "Find the largest of {list}.")
LARGER_ZH = ("哪个数最大：{list}？", "{list}中哪个最大？", "找出最大的数：{list}。")
SMALLER_EN = ("Which is smaller, {list}?", "Which number is the smallest: {list}?", "Find the smallest of {list}.")
SMALLER_ZH = ("哪个数最小：{list}？", "{list}中哪个最小？", "找出最小的数：{list}。")
SORT_UP_EN = (
    "Sort {list}.",
    "Sort these numbers: {list}.",
    "Put {list} in order.",
    "Sort from small to large: {list}.",
)
SORT_UP_ZH = ("把{list}从小到大排列。", "从小到大排序：{list}。", "请排序：{list}。")
SORT_DOWN_EN = (
    "Sort {list} from large to small.",
    "Put {list} in descending order.",
    "Sort from large to small: {list}.",
)
SORT_DOWN_ZH = ("把{list}从大到小排列。", "从大到小排序：{list}。")


SEVERAL_EN = ("Calculate:", "Please calculate:", "Work these out:", "What are these?", "Solve:")
SEVERAL_ZH = ("计算：", "请计算：", "请算一算：", "这些等于多少？", "算出结果：")
MOST_AT_ONCE = 12


def number(rng: Random) -> int:
    """A number of one, two or three digits, with equal probability of each length."""
    digits = rng.randint(1, 3)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


@dataclass(frozen=True)
class Operation:
    """Operation on two numbers. Unordered pairs are held out."""

    name: str
    sign: str
    apply: Callable[[int, int], int]
    ordered: bool
    """True if the larger number comes first."""

    def draw(self, rng: Random, split: Split) -> tuple[int, int]:
        def operands() -> tuple[int, int]:
            low, high = sorted((number(rng), number(rng)))
            return low, high

        low, high = split.draw(operands, key=lambda pair: (self.name, *pair))
        return (high, low) if self.ordered or rng.random() < 0.5 else (low, high)

    def ask(self, a: int, b: int) -> str:
        return f"{a} {self.sign} {b}"

    def answer(self, a: int, b: int) -> str:
        return f"{self.ask(a, b)} = {self.apply(a, b)}"


PLUS = Operation("add", "+", int.__add__, ordered=False)
MINUS = Operation("subtract", "-", int.__sub__, ordered=True)


def single(operation: Operation, english: tuple[str, ...], chinese: tuple[str, ...]) -> Skill:
    """Skill of a single calculation, in several wordings."""

    def make(rng: Random, split: Split) -> Exchange:
        a, b = operation.draw(rng, split)
        wording = one_of(rng, chinese if is_chinese(rng, 0.3) else english)
        key = f"{operation.name}:{min(a, b)}:{max(a, b)}"
        return Exchange(wording.format(a=a, b=b), operation.answer(a, b), key)

    return make


add = single(PLUS, ADD_EN, ADD_ZH)
subtract = single(MINUS, SUBTRACT_EN, SUBTRACT_ZH)


def several(rng: Random, split: Split) -> Exchange:
    """Several sums and differences, one per line: two to twelve in training, two in evaluation."""
    size = rng.randint(2, MOST_AT_ONCE) if split is Split.TRAIN else 2
    operations = [one_of(rng, (PLUS, MINUS)) for _ in range(size)]
    drawn = [(operation, *operation.draw(rng, split)) for operation in operations]
    asked = "\n".join(operation.ask(a, b) for operation, a, b in drawn)
    wording = one_of(rng, SEVERAL_ZH if is_chinese(rng, 0.3) else SEVERAL_EN)
    answer = "\n".join(operation.answer(a, b) for operation, a, b in drawn)
    return Exchange(f"{wording}\n{asked}", answer, f"several:{asked}")


def times(rng: Random, split: Split) -> Exchange:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    wording = split.wording(rng, TIMES_ZH if is_chinese(rng, 0.3) else TIMES_EN)
    return Exchange(wording.format(a=a, b=b), f"{a} × {b} = {a * b}", f"times:{wording}:{a}:{b}")


def _distinct(rng: Random, split: Split, name: str, low: int, high: int) -> list[int]:
    """``low`` to ``high`` distinct numbers whose set belongs to this split."""

    def make() -> list[int]:
        numbers: dict[int, None] = {}
        size = rng.randint(low, high)
        while len(numbers) < size:
            numbers[number(rng)] = None
        return list(numbers)

    return split.draw(make, key=lambda numbers: (name, *sorted(numbers)))


def compare(rng: Random, split: Split) -> Exchange:
    numbers = _distinct(rng, split, "compare", 2, 3)
    chinese, largest = is_chinese(rng, 0.3), rng.random() < 0.5
    chosen = max(numbers) if largest else min(numbers)
    if chinese:
        wording = one_of(rng, LARGER_ZH if largest else SMALLER_ZH)
        listed = "、".join(map(str, numbers))
        answer = f"{chosen}最{'大' if largest else '小'}。"
    else:
        wordings, two = LARGER_EN if largest else SMALLER_EN, len(numbers) == 2
        wording = wordings[0] if two else one_of(rng, wordings[1:])
        listed = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
        if two:
            answer = f"{chosen} is {'larger' if largest else 'smaller'}."
        else:
            answer = f"{chosen} is the {'largest' if largest else 'smallest'}."
    return Exchange(wording.format(list=listed), answer, "compare:" + ",".join(map(str, sorted(numbers))))


def sort(rng: Random, split: Split) -> Exchange:
    numbers = _distinct(rng, split, "sort", 3, 4)
    chinese, down = is_chinese(rng, 0.3), rng.random() < 0.4
    english_wordings, chinese_wordings = (SORT_DOWN_EN, SORT_DOWN_ZH) if down else (SORT_UP_EN, SORT_UP_ZH)
    separator = "、" if chinese else ", "
    wording = one_of(rng, chinese_wordings if chinese else english_wordings)
    answer = separator.join(map(str, sorted(numbers, reverse=down)))
    listed = separator.join(map(str, numbers))
    return Exchange(wording.format(list=listed), answer, "sort:" + ",".join(map(str, sorted(numbers))))


SKILLS: dict[str, Skill] = {
    "add": add,
    "subtract": subtract,
    "several sums": several,
    "times table": times,
    "compare": compare,
    "sort numbers": sort,
}
