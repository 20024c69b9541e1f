"""Extraction of data from a sentence as JSON, for a list of fields or for a JSON schema."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from .base import Check, Exchange, Skill, Split, is_chinese, one_of
from .recall import (
    ANIMALS_EN,
    ANIMALS_ZH,
    CITIES_EN,
    CITIES_ZH,
    COLOURS_EN,
    COLOURS_ZH,
    ITEMS_EN,
    ITEMS_ZH,
    JOBS_EN,
    JOBS_ZH,
    PEOPLE_EN,
    PEOPLE_ZH,
    PLACES_EN,
    PLACES_ZH,
    Word,
)

CHINESE_SHARE = 0.35
NULL_SHARE = 0.2
TASK_SHARE = 0.3


@dataclass(frozen=True)
class Field:
    """Field of a record: its name, its JSON values, and the wordings of values that are not written literally."""

    name: str
    values: Sequence[Any]
    said: dict[bool, str] | None = None
    enum: bool = False
    many: bool = False

    def draw(self, rng: Random, comma: str, last: str) -> tuple[Any, object]:
        """Draw a value, and its wording in the text."""
        value = one_of(rng, self.values)
        if self.many:
            value = rng.sample(self.values, rng.randint(2, 4))
            return value, comma.join(value[:-1]) + last + value[-1]
        return value, self.said[value] if self.said else value

    def schema(self, rng: Random, value: object) -> dict[str, Any]:
        """JSON schema of the field; an enum lists the value and others in random order."""
        if isinstance(value, list):
            return {"type": "array", "items": {"type": "string"}}
        if self.enum:
            others = [other for other in self.values if other != value]
            return {"enum": rng.sample([value, *rng.sample(others, min(2, len(others)))], min(3, len(self.values)))}
        return {"type": "boolean" if isinstance(value, bool) else "integer" if isinstance(value, int) else "string"}


@dataclass(frozen=True)
class Record:
    """Kind of record: its fields, and the texts with all or some of them."""

    fields: tuple[Field, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Data:
    """Drawn record: a text, the values in it, and the fields that the text omits."""

    text: str
    values: dict[str, Any]
    fields: dict[str, Field]
    unsaid: tuple[str, ...]


@dataclass(frozen=True)
class Language:
    plain: tuple[Record, ...]  # every value is literally in the text
    judged: tuple[Record, ...]  # with booleans, lists and enums, which need a schema
    requests: tuple[str, ...]
    schema_requests: tuple[str, ...]
    tasks: tuple[Callable[[Random], Data], ...]
    comma: str
    last: str


def some(*names: str) -> tuple[Word, ...]:
    return tuple(map(Word, names))


COUNTED_EN = some(
    *(f"{item}s" for item in ITEMS_EN if item in {"apple", "lemon", "book", "pen", "lamp", "clock", "cup", "plate"}),
    *(f"{item}s" for item in ITEMS_EN if item in {"spoon", "chair", "candle", "bottle", "coat", "hat", "ball", "kite"}),
)
COUNTED_ZH = some("苹果", "梨", "柠檬", "杯子", "盘子", "勺子", "篮子", "瓶子", "盒子", "球", "风筝", "贝壳")
DAYS_EN = some("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DAYS_ZH = some("星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日")
SIZES = some("small", "medium", "large")
AGES, PET_AGES, HOURS, COUNTS, PRICES = range(18, 90), range(2, 16), range(1, 13), range(2, 30), range(2, 100)

PLAIN_EN = (
    Record(
        (Field("name", PEOPLE_EN), Field("age", AGES), Field("city", CITIES_EN), Field("job", JOBS_EN)),
        (
            "{name} is {age} years old and lives in {city}.",
            "{name} is {job:a} from {city}.",
            "{name}, who is {age}, works as {job:a} in {city}.",
            "My friend {name} is {age} years old and works as {job:a}.",
            "In {city} there lives {job:a} called {name}.",
            "{name} moved to {city} at the age of {age} to work as {job:a}.",
            "This is {name}. Age: {age}. City: {city}.",
            "At {age}, {name} is still {job:a}.",
            "I met {name} in {city}. {name} is {job:a} and {age} years old.",
        ),
    ),
    Record(
        (Field("item", COUNTED_EN), Field("count", COUNTS), Field("colour", COLOURS_EN), Field("price", PRICES)),
        (
            "I want to order {count} {colour} {item} at {price} euros each.",
            "Please send me {count} {item} in {colour}.",
            "We need {count} {colour} {item}.",
            "The {colour} {item} cost {price} euros.",
            "She bought {count} {item} and paid {price} euros.",
            "Order: {count} {item}, {colour}, {price} euros.",
            "He sold {count} {colour} {item} for {price} euros.",
        ),
    ),
    Record(
        (Field("name", PEOPLE_EN), Field("day", DAYS_EN), Field("place", PLACES_EN), Field("hour", HOURS)),
        (
            "You meet {name} on {day} at {hour} o'clock {place:in}.",
            "{name} will be {place:in} on {day}.",
            "On {day} at {hour} o'clock I will see {name}.",
            "The meeting with {name} is {place:in} at {hour} o'clock.",
            "Meeting on {day}, {hour} o'clock, with {name}.",
            "{name} waits for you {place:in} at {hour} o'clock on {day}.",
        ),
    ),
    Record(
        (Field("name", PEOPLE_EN), Field("animal", ANIMALS_EN), Field("colour", COLOURS_EN), Field("age", PET_AGES)),
        (
            "{name} is {colour:a} {animal} and {age} years old.",
            "We have {animal:a} called {name}. It is {colour}.",
            "Our {animal} {name} is {age} years old.",
            "The {colour} {animal} over there is {name}.",
            "{name} the {animal} is {colour} and {age} years old.",
            "I have {colour:a} {animal}. Its name is {name} and its age is {age}.",
        ),
    ),
    Record(
        (Field("name", PEOPLE_EN), Field("city", CITIES_EN), Field("day", DAYS_EN), Field("price", PRICES)),
        (
            "{name} goes to {city} on {day}. The ticket costs {price} euros.",
            "On {day} {name} will travel to {city}.",
            "A ticket to {city} for {name}, {price} euros.",
            "{name} paid {price} euros for the train to {city} on {day}.",
            "The trip of {name} to {city} begins on {day}.",
        ),
    ),
)
PLAIN_ZH = (
    Record(
        (Field("姓名", PEOPLE_ZH), Field("年龄", AGES), Field("城市", CITIES_ZH), Field("工作", JOBS_ZH)),
        (
            "{姓名}今年{年龄}岁，住在{城市}。",
            "{姓名}在{城市}做{工作}。",
            "{姓名}是一名{工作}，今年{年龄}岁。",
            "我的朋友{姓名}住在{城市}，是一名{工作}，今年{年龄}岁。",
            "住在{城市}的{工作}叫{姓名}。",
            "{年龄}岁的{姓名}住在{城市}。",
        ),
    ),
    Record(
        (Field("东西", COUNTED_ZH), Field("数量", COUNTS), Field("颜色", COLOURS_ZH), Field("价格", PRICES)),
        (
            "我要买{数量}个{颜色}的{东西}，每个{价格}元。",
            "请给我{数量}个{颜色}的{东西}。",
            "{颜色}的{东西}要{价格}元。",
            "她买了{数量}个{东西}，一共{价格}元。",
            "我们还要{数量}个{东西}。",
        ),
    ),
    Record(
        (Field("姓名", PEOPLE_ZH), Field("日子", DAYS_ZH), Field("地方", PLACES_ZH), Field("钟点", HOURS)),
        (
            "{日子}{钟点}点，{姓名}在{地方}等你。",
            "{姓名}{日子}在{地方}。",
            "我{日子}{钟点}点和{姓名}见面。",
            "{钟点}点在{地方}和{姓名}见面。",
            "和{姓名}的会在{日子}{钟点}点，地方是{地方}。",
        ),
    ),
    Record(
        (Field("名字", PEOPLE_ZH), Field("动物", ANIMALS_ZH), Field("颜色", COLOURS_ZH), Field("年龄", PET_AGES)),
        (
            "{名字}是一只{颜色}的{动物}，今年{年龄}岁。",
            "我们的{动物}叫{名字}，今年{年龄}岁。",
            "那只{颜色}的{动物}叫{名字}。",
            "我有一只{动物}，它叫{名字}，是{颜色}的。",
            "{名字}是我的{动物}，{年龄}岁了。",
        ),
    ),
)

JUDGED_EN = (
    Record(
        (
            Field("name", PEOPLE_EN),
            Field("items", ITEMS_EN, many=True),
            Field("paid", (True, False), {True: "has paid", False: "has not paid"}),
            Field("price", PRICES),
        ),
        (
            "{name} takes these items: {items}. {name} {paid}.",
            "{name} {paid} the {price} euros for these items: {items}.",
            "Order of {name}: {items}. The price is {price} euros.",
            "Items: {items}. The price is {price} euros. The buyer {paid}.",
        ),
    ),
    Record(
        (
            Field("item", ITEMS_EN),
            Field("colour", COLOURS_EN, enum=True),
            Field("price", PRICES),
            Field("sold", (True, False), {True: "is sold", False: "is not sold yet"}),
        ),
        (
            "The {colour} {item} {sold}.",
            "The {item} for {price} euros {sold}.",
            "The {item} is {colour}, costs {price} euros and {sold}.",
            "It is {colour:a} {item} and costs {price} euros.",
        ),
    ),
    Record(
        (
            Field("name", PEOPLE_EN),
            Field("animal", ANIMALS_EN),
            Field("size", SIZES, enum=True),
            Field("hungry", (True, False), {True: "is hungry", False: "is not hungry"}),
        ),
        (
            "{name} is a {size} {animal} and {hungry}.",
            "The {size} {animal} {name} {hungry}.",
            "Our {animal} {name} {hungry}.",
            "{name} the {animal} is of {size} size.",
        ),
    ),
    Record(
        (
            Field("name", PEOPLE_EN),
            Field("age", AGES),
            Field("job", JOBS_EN, enum=True),
            Field("married", (True, False), {True: "is married", False: "is not married"}),
        ),
        (
            "{name} is {age} years old and {married}.",
            "{name} is {job:a} and {married}.",
            "{name}, {job:a}, is {age} years old.",
            "The {job} {name} is {age} years old and {married}.",
        ),
    ),
)
JUDGED_ZH = (
    Record(
        (
            Field("姓名", PEOPLE_ZH),
            Field("东西", ITEMS_ZH, many=True),
            Field("已付", (True, False), {True: "已经付钱了", False: "还没有付钱"}),
            Field("价格", PRICES),
        ),
        (
            "{姓名}买了{东西}，{已付}。",
            "{姓名}要这些东西：{东西}，一共{价格}元。",
            "{东西}一共{价格}元，{姓名}{已付}。",
            "{姓名}买了{东西}。",
        ),
    ),
    Record(
        (
            Field("物品", ITEMS_ZH),
            Field("颜色", COLOURS_ZH, enum=True),
            Field("价格", PRICES),
            Field("卖了", (True, False), {True: "已经卖了", False: "还没有卖"}),
        ),
        (
            "{颜色}的{物品}{卖了}。",
            "{物品}要{价格}元，{卖了}。",
            "{物品}是{颜色}的，要{价格}元，{卖了}。",
            "这是{颜色}的{物品}，要{价格}元。",
        ),
    ),
    Record(
        (
            Field("姓名", PEOPLE_ZH),
            Field("年龄", AGES),
            Field("工作", JOBS_ZH, enum=True),
            Field("结婚", (True, False), {True: "结婚了", False: "没有结婚"}),
        ),
        (
            "{姓名}今年{年龄}岁，{结婚}。",
            "{姓名}是{工作}，{结婚}。",
            "{工作}{姓名}今年{年龄}岁。",
            "{姓名}是一名{工作}，今年{年龄}岁，{结婚}。",
        ),
    ),
)

REQUESTS_EN = (
    "Extract {fields} as JSON: {text}",
    "Extract {fields} as JSON.\n{text}",
    "Give me {fields} as JSON: {text}",
    "{text}\nReturn {fields} as JSON.",
    "Write {fields} as a JSON object: {text}",
    "Text: {text}\nGive {fields} as JSON.",
    "Read the text and return {fields} as JSON.\n{text}",
    "{text}\nExtract {fields}. Answer with JSON only.",
)
REQUESTS_ZH = (
    "提取{fields}，输出JSON：{text}",
    "用JSON给出{fields}：{text}",
    "{text}\n请用JSON写出{fields}。",
    "从下面的文字提取{fields}，用JSON回答。\n{text}",
    "文字：{text}\n请提取{fields}，只输出JSON。",
    "请把{fields}写成JSON：{text}",
)
SCHEMA_REQUESTS_EN = (
    "Answer with JSON for this schema: {schema}\n{text}",
    "{text}\nAnswer with JSON that fits this schema: {schema}",
    "Schema: {schema}\nText: {text}",
    "Use this JSON schema: {schema}\n{text}",
    "Write a JSON object for this schema: {schema}\nText: {text}",
    "{text}\nSchema: {schema}",
)
SCHEMA_REQUESTS_ZH = (
    "请按这个模式输出JSON：{schema}\n{text}",
    "{text}\n请按这个模式用JSON回答：{schema}",
    "模式：{schema}\n文字：{text}",
    "{text}\n模式：{schema}",
    "请用这个JSON模式：{schema}\n{text}",
)

PAIR_TEXTS_EN = ("Take {a} and {b}.", "Compare {a} and {b}.", "The numbers are {a} and {b}.", "We have {a} and {b}.")
PAIR_TEXTS_ZH = ("有{a}和{b}。", "请比较{a}和{b}。", "两个数是{a}和{b}。", "这里是{a}和{b}。")
LIST_TEXTS_EN = ("The words are: {words}.", "Here are some words: {words}.", "Take this list: {words}.")
LIST_TEXTS_ZH = ("这些词是：{words}。", "这里有一些词：{words}。", "清单：{words}。")
KIND_TEXTS_EN = ("The word is: {word}.", "What is this: {word}?", "Word: {word}", "What kind of word is {word}?")
KIND_TEXTS_ZH = ("这个词是：{word}。", "{word}是什么？", "词：{word}", "{word}是哪一类词？")
KINDS_EN = {"animal": ANIMALS_EN, "colour": COLOURS_EN, "city": CITIES_EN, "job": JOBS_EN}
KINDS_ZH = {"动物": ANIMALS_ZH, "颜色": COLOURS_ZH, "城市": CITIES_ZH, "工作": JOBS_ZH}


def pair_task(names: tuple[str, str], texts: Sequence[str]) -> Callable[[Random], Data]:
    """Find the larger and the smaller of two numbers."""

    def task(rng: Random) -> Data:
        a, b = rng.sample(range(1, 100), 2)
        return solved(one_of(rng, texts).format(a=a, b=b), names, (max(a, b), min(a, b)))

    return task


def list_task(
    names: tuple[str, str, str, str], items: Sequence[Word], texts: Sequence[str], comma: str
) -> Callable[[Random], Data]:
    """Number, first and last of the words in a list, and all of them."""

    def task(rng: Random) -> Data:
        words = rng.sample(items, rng.randint(2, 5))
        values = (len(words), words[0], words[-1], words)
        return solved(one_of(rng, texts).format(words=comma.join(words)), names, values)

    return task


def kind_task(
    names: tuple[str, str], kinds: dict[str, tuple[Word, ...]], texts: Sequence[str]
) -> Callable[[Random], Data]:
    """Return a task that asks for a word and its category."""

    def task(rng: Random) -> Data:
        kind = one_of(rng, list(kinds))
        word = one_of(rng, kinds[kind])
        data = solved(one_of(rng, texts).format(word=word), names, (word, kind))
        data.fields[names[1]] = Field(names[1], list(kinds), enum=True)
        return data

    return task


def solved(text: str, names: Sequence[str], values: Sequence[Any]) -> Data:
    fields = {name: Field(name, ()) for name in names}
    return Data(text, dict(zip(names, values, strict=True)), fields, ())


ENGLISH = Language(
    plain=PLAIN_EN,
    judged=JUDGED_EN,
    requests=REQUESTS_EN,
    schema_requests=SCHEMA_REQUESTS_EN,
    tasks=(
        pair_task(("larger", "smaller"), PAIR_TEXTS_EN),
        list_task(("count", "first", "last", "words"), ITEMS_EN, LIST_TEXTS_EN, ", "),
        kind_task(("word", "kind"), KINDS_EN, KIND_TEXTS_EN),
    ),
    comma=", ",
    last=" and ",
)
CHINESE = Language(
    plain=PLAIN_ZH,
    judged=JUDGED_ZH,
    requests=REQUESTS_ZH,
    schema_requests=SCHEMA_REQUESTS_ZH,
    tasks=(
        pair_task(("大数", "小数"), PAIR_TEXTS_ZH),
        list_task(("数量", "第一", "最后", "词"), ITEMS_ZH, LIST_TEXTS_ZH, "、"),
        kind_task(("词", "种类"), KINDS_ZH, KIND_TEXTS_ZH),
    ),
    comma="、",
    last="和",
)


def extract(rng: Random, split: Split) -> Exchange:
    """Extract some fields of a sentence as JSON; a field that is not in the sentence is null."""
    language = draw_language(rng)

    def make() -> tuple[Data, dict[str, Any]]:
        data = draw_data(rng, language, language.plain)
        asked = rng.sample(list(data.values), rng.randint(1, len(data.values)))
        if data.unsaid and rng.random() < NULL_SHARE:
            asked.insert(rng.randint(0, len(asked)), one_of(rng, data.unsaid))
        return data, {name: data.values.get(name) for name in asked}

    data, answer = split.draw(make, key=lambda drawn: (as_json(drawn[1]),))
    request = one_of(rng, language.requests).format(fields=enumeration(language, list(answer)), text=data.text)
    return Exchange(request, as_json(answer), key=as_json(answer), check=Check.JSON)


def schema_answer(rng: Random, split: Split) -> Exchange:
    """A JSON object for a schema; an optional property is omitted if it is not in the text."""
    language = draw_language(rng)

    def make() -> tuple[Data, dict[str, Any]]:
        if rng.random() < TASK_SHARE:
            data = one_of(rng, language.tasks)(rng)
        else:
            data = draw_data(rng, language, language.plain + language.judged)
        names = rng.sample(list(data.values), rng.randint(2, len(data.values)))
        return data, {name: data.values[name] for name in names}

    data, answer = split.draw(make, key=lambda drawn: (as_json(drawn[1]),))
    request = one_of(rng, language.schema_requests).format(schema=draw_schema(rng, data, answer), text=data.text)
    return Exchange(request, as_json(answer), key=as_json(answer), check=Check.JSON)


def draw_data(rng: Random, language: Language, records: Sequence[Record]) -> Data:
    record = one_of(rng, records)
    text = one_of(rng, record.texts)
    said = frozenset(name for _, name, _, _ in string.Formatter().parse(text) if name)
    fields = {field.name: field for field in record.fields}
    drawn = {name: field.draw(rng, language.comma, language.last) for name, field in fields.items() if name in said}
    return Data(
        text=text.format(**{name: words for name, (_, words) in drawn.items()}),
        values={name: value for name, (value, _) in drawn.items()},
        fields=fields,
        unsaid=tuple(name for name in fields if name not in said),
    )


def draw_schema(rng: Random, data: Data, answer: dict[str, Any]) -> str:
    """A schema for the answer, sometimes with an additional property that is not in the text."""
    properties = [(name, data.fields[name].schema(rng, value)) for name, value in answer.items()]
    if data.unsaid and rng.random() < NULL_SHARE:
        name = one_of(rng, data.unsaid)
        field = data.fields[name]
        properties.insert(rng.randint(0, len(properties)), (name, field.schema(rng, example(rng, field))))
    return json.dumps(
        {"type": "object", "properties": dict(properties), "required": list(answer)},
        ensure_ascii=False,
        separators=(",", ":"),
    )


def example(rng: Random, field: Field) -> object:
    return [] if field.many else one_of(rng, field.values)


def enumeration(language: Language, names: Sequence[str]) -> str:
    """Names as an enumeration: ``name, age and city``."""
    return language.last.join(part for part in (language.comma.join(names[:-1]), names[-1]) if part)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def draw_language(rng: Random) -> Language:
    return CHINESE if is_chinese(rng, CHINESE_SHARE) else ENGLISH


SKILLS: dict[str, Skill] = {"extract": extract, "json schema": schema_answer}
