"""Tools: calling one of the offered functions, answering from its result, and recognizing that none fits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from . import geography, persona, words
from .base import Check, Conversation, Exchange, Message, Skill, Split, assistant, call, is_chinese, one_of, user
from .base import tool as tool_message
from .lexicon import ANIMALS, CITIES, COLOURS, ITEMS, NAMES_EN, NAMES_ZH, PLACES
from .recall import Word

CHINESE_SHARE = 0.35
MOST_BEFORE = 3
PLAIN_SHARE = 0.45
MOST_OFFERED = 4
UNGRADED = ("turn_on", "turn_off", "find_item", "get_distance", "convert_money", "send_message")
"""Functions that held-out questions do not ask for unless they are offered, since the model calls them, or similar
ones, anyway."""

ENGLISH, CHINESE = 0, 1

DEVICES = (
    ("lamp", "台灯"),
    ("radio", "收音机"),
    ("fan", "风扇"),
    ("camera", "相机"),
    ("television", "电视"),
    ("light", "灯"),
    ("music", "音乐"),
    ("oven", "烤箱"),
)
SKIES = (
    ("sunny", "晴天"),
    ("cloudy", "多云"),
    ("rainy", "下雨"),
    ("snowy", "下雪"),
    ("windy", "有风"),
    ("foggy", "有雾"),
)
DAYS = (
    ("Monday", "星期一"),
    ("Tuesday", "星期二"),
    ("Wednesday", "星期三"),
    ("Thursday", "星期四"),
    ("Friday", "星期五"),
    ("Saturday", "星期六"),
    ("Sunday", "星期日"),
)
MONEY = (("euros", "欧元"), ("dollars", "美元"), ("pounds", "英镑"), ("yuan", "人民币"))
TITLES = (
    ("Blue River", "蓝色的河"),
    ("Silver Moon", "银色的月亮"),
    ("The Old Clock", "老钟"),
    ("Cold Morning", "冷的早上"),
    ("White Horse", "白马"),
    ("Small Garden", "小花园"),
    ("The Last Train", "最后的火车"),
    ("Green Forest", "绿色的森林"),
    ("Red Flower", "红花"),
    ("Summer Night", "夏天的晚上"),
    ("The Quiet Village", "安静的村庄"),
    ("Black Cat", "黑猫"),
)
TEXTS = (
    ("I am late", "我迟到了"),
    ("see you on Monday", "星期一见"),
    ("the tea is ready", "茶好了"),
    ("please call me", "请打电话给我"),
    ("I am at home", "我在家"),
    ("the train is late", "火车晚了"),
    ("buy some bread", "买一点面包"),
    ("feed the cat", "喂猫"),
    ("good night", "晚安"),
    ("thank you", "谢谢你"),
    ("water the flowers", "给花浇水"),
    ("close the window", "关上窗户"),
)
TRANSLATED = {**dict(ANIMALS), **dict(COLOURS), **dict(ITEMS)}

Pool = tuple[Sequence[Any], Sequence[Any]]


def both(values: Sequence[Any]) -> Pool:
    """Pool with the same values in both languages."""
    return values, values


def pool(*tables: Sequence[tuple[str, str]]) -> Pool:
    pairs = [pair for table in tables for pair in table]
    return [Word(english) for english, _ in pairs], [Word(chinese) for _, chinese in pairs]


POOLS: dict[str, Pool] = {
    "city": pool(CITIES),
    "item": pool(ITEMS),
    "place": pool(PLACES),
    "device": pool(DEVICES),
    "sky": pool(SKIES),
    "day": pool(DAYS),
    "money": pool(MONEY),
    "title": pool(TITLES),
    "text": pool(TEXTS),
    "word": both([*TRANSLATED]),
    "name": (NAMES_EN, NAMES_ZH),
    "hour": both(range(5, 24)),
    "minute": both(range(0, 60, 5)),
    "minutes": both(range(2, 60)),
    "people": both(range(2, 13)),
    "degrees": both(range(-9, 36)),
    "warmth": both(range(15, 30)),
    "number": both(range(2, 1000)),
    "factor": both(range(2, 100)),
    "amount": both(range(5, 500)),
    "price": both(range(2, 100)),
    "small": both(range(2, 40)),
    "distance": both(range(100, 2000)),
    "ok": both((True, True, True, True, False)),
    "phone": both([str(number) for number in range(1000, 10_000)]),
    "time": both([f"{hour}:{minute:02}" for hour in range(24) for minute in range(60)]),
}


@dataclass(frozen=True)
class Tool:
    """A function: its parameters and results with pools of values, and the wordings of requests.

    ``answers`` are the English and Chinese answers from arguments and results; ``failures`` are the answers to the
    result ``{"ok": false}``.
    """

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    asks: tuple[tuple[str, ...], tuple[str, ...]]
    answers: tuple[str, str]
    failures: tuple[str, str] = ("", "")
    compute: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        properties = {name: {"type": json_type(POOLS[values][ENGLISH][0])} for name, values in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Use:
    """Use of a tool: question, call, result and answer."""

    tool: Tool
    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str

    @property
    def request(self) -> list[Message]:
        return [user(self.question), call(self.tool.name, self.arguments)]

    @property
    def reply(self) -> list[Message]:
        return [tool_message(as_json(self.result)), assistant(self.answer)]

    @property
    def call_key(self) -> str:
        return f"{self.tool.name} {as_json(self.arguments)}"

    @property
    def held_out(self) -> tuple[object, ...]:
        """Value that decides the split: the call, or the operands of a sum, as in other skills."""
        if self.tool is ADD:
            return ("add", *sorted(self.arguments.values()))
        return (self.call_key,)

    @property
    def answer_key(self) -> str:
        return f"{self.call_key} {as_json(self.result)}"


def json_type(value: object) -> str:
    return "integer" if isinstance(value, int) else "string"


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


WEATHER = Tool(
    "get_weather",
    "Weather in a city",
    (("city", "city"),),
    (("degrees", "degrees"), ("sky", "sky")),
    (
        (
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "Is it warm in {city}?",
            "How cold is it in {city}?",
            "Do I need a coat in {city}?",
            "I am going to {city}. How is the weather there?",
        ),
        (
            "{city}的天气怎么样？",
            "今天{city}天气好吗？",
            "请告诉我{city}的天气。",
            "{city}冷不冷？",
            "{city}现在多少度？",
        ),
    ),
    ("It is {degrees} degrees and {sky} in {city}.", "{city}现在{degrees}度，{sky}。"),
)
TIME = Tool(
    "get_time",
    "Time in a city",
    (("city", "city"),),
    (("time", "time"),),
    (
        (
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Tell me the time in {city}.",
            "How late is it in {city} now?",
            "I want to know the time in {city}.",
            "My friend lives in {city}. What time is it there?",
        ),
        ("{city}现在几点？", "现在{city}是几点？", "请告诉我{city}的时间。", "我想知道{city}的时间。"),
    ),
    ("It is {time} in {city}.", "{city}现在是{time}。"),
)
ADD = Tool(
    "add_numbers",
    "Add two numbers",
    (("a", "number"), ("b", "number")),
    (),
    (
        (
            "What is {a} + {b}?",
            "Add {a} and {b}.",
            "What is {a} plus {b}?",
            "What is the sum of {a} and {b}?",
            "How much is {a} and {b} together?",
            "Please add {a} and {b}.",
        ),
        ("{a} + {b} = ?", "{a}加{b}等于多少？", "请算{a}加{b}。", "{a}和{b}的和是多少？"),
    ),
    ("{a} + {b} = {sum}", "{a} + {b} = {sum}"),
    compute=lambda arguments: {"sum": arguments["a"] + arguments["b"]},
)
MULTIPLY = Tool(
    "multiply",
    "Multiply two numbers",
    (("a", "factor"), ("b", "factor")),
    (),
    (
        (
            "What is {a} times {b}?",
            "Multiply {a} by {b}.",
            "What is {a} × {b}?",
            "I need {a} times {b}.",
            "What is the product of {a} and {b}?",
            "Please multiply {a} by {b}.",
        ),
        ("{a}乘{b}等于多少？", "{a} * {b} = ?", "请算{a}乘{b}。", "{a}和{b}的积是多少？"),
    ),
    ("{a} × {b} = {product}", "{a} × {b} = {product}"),
    compute=lambda arguments: {"product": arguments["a"] * arguments["b"]},
)
TRANSLATE = Tool(
    "translate",
    "Translate a word to Chinese",
    (("word", "word"),),
    (),
    (
        (
            'What is "{word}" in Chinese?',
            'Translate "{word}" to Chinese.',
            'How do you say "{word}" in Chinese?',
            'Tell me the Chinese word for "{word}".',
            'Which Chinese word means "{word}"?',
            'I need "{word}" in Chinese.',
        ),
        ("“{word}”用中文怎么说？", "请把“{word}”翻译成中文。", "“{word}”的中文是什么？", "“{word}”是什么意思？"),
    ),
    ('"{word}" is {chinese} in Chinese.', "“{word}”的中文是{chinese}。"),
    compute=lambda arguments: {"chinese": TRANSLATED[arguments["word"]]},
)
MATHS = (ADD, MULTIPLY)

TOOLS = (
    WEATHER,
    TIME,
    *MATHS,
    TRANSLATE,
    Tool(
        "send_message",
        "Send a message",
        (("to", "name"), ("text", "text")),
        (("ok", "ok"),),
        (
            (
                "Send {to} the message: {text}",
                "Tell {to}: {text}",
                "Write to {to}: {text}",
                "Send this message to {to}: {text}",
                "Message to {to}: {text}",
                "Please let {to} know: {text}",
            ),
            ("给{to}发消息：{text}", "告诉{to}：{text}", "请发消息给{to}：{text}", "请给{to}写：{text}"),
        ),
        ("I sent the message to {to}.", "我给{to}发了消息。"),
        ("I could not send the message to {to}.", "我没能给{to}发消息。"),
    ),
    Tool(
        "set_alarm",
        "Set an alarm",
        (("hour", "hour"), ("minute", "minute")),
        (("ok", "ok"),),
        (
            (
                "Set an alarm for {hour}:{minute:02}.",
                "Wake me at {hour}:{minute:02}.",
                "I have to get up at {hour}:{minute:02}. Set the alarm.",
                "Please set the alarm to {hour}:{minute:02}.",
                "I need an alarm at {hour}:{minute:02}.",
                "Let the alarm ring at {hour}:{minute:02}.",
            ),
            (
                "请在{hour}:{minute:02}叫我起床。",
                "闹钟定在{hour}:{minute:02}。",
                "我要{hour}:{minute:02}起床，请定闹钟。",
                "请定{hour}:{minute:02}的闹钟。",
            ),
        ),
        ("The alarm is set for {hour}:{minute:02}.", "闹钟定在{hour}:{minute:02}了。"),
        ("I could not set the alarm.", "我没能定闹钟。"),
    ),
    Tool(
        "set_timer",
        "Set a timer",
        (("minutes", "minutes"),),
        (("ok", "ok"),),
        (
            (
                "Set a timer for {minutes} minutes.",
                "Start a timer of {minutes} minutes.",
                "Please set the timer to {minutes} minutes.",
                "Give me a timer for {minutes} minutes.",
                "The tea needs {minutes} minutes. Set a timer.",
                "I want a timer for {minutes} minutes.",
            ),
            (
                "请计时{minutes}分钟。",
                "开始计时{minutes}分钟。",
                "我要一个{minutes}分钟的计时。",
                "茶要{minutes}分钟，请计时。",
            ),
        ),
        ("The timer runs for {minutes} minutes.", "开始计时{minutes}分钟了。"),
        ("I could not set the timer.", "我没能计时。"),
    ),
    Tool(
        "find_item",
        "Where an item is",
        (("item", "item"),),
        (("place", "place"),),
        (
            (
                "Where is the {item}?",
                "Find the {item}.",
                "Where can I find the {item}?",
                "I am looking for the {item}.",
                "Where did I leave the {item}?",
                "Can you find the {item}?",
                "Somebody lost the {item}. Where is it?",
            ),
            ("{item}在哪里？", "请找一下{item}。", "我在找{item}。", "哪里可以找到{item}？", "我的{item}在哪里？"),
        ),
        ("The {item} is {place:in}.", "{item}在{place}。"),
    ),
    Tool(
        "book_table",
        "Book a table",
        (("name", "name"), ("people", "people"), ("day", "day")),
        (("table", "small"),),
        (
            (
                "Book a table for {people} people on {day} for {name}.",
                "I need a table on {day} for {people} people. The name is {name}.",
                "{name} wants a table for {people} people on {day}.",
                "Please book a table on {day}, {people} people, name {name}.",
                "My name is {name}. Book a table for {people} people on {day}.",
                "On {day} {name} comes with a party of {people} people. Book a table.",
            ),
            (
                "请为{name}订一张{day}的桌子，{people}个人。",
                "{name}要订{day}的桌子，一共{people}个人。",
                "我叫{name}，{day}要一张{people}个人的桌子。",
                "{day}有{people}个人，请用{name}的名字订桌子。",
            ),
        ),
        ("Table {table} is booked for {name} on {day}.", "为{name}订了{day}的{table}号桌子。"),
    ),
    Tool(
        "play_song",
        "Play a song",
        (("title", "title"),),
        (("ok", "ok"),),
        (
            (
                "Play the song {title}.",
                "I want to hear the song {title}.",
                "Please play {title}.",
                "Put on the song {title}.",
                "Let me hear {title}.",
                "Can you play {title}?",
            ),
            ("请放《{title}》。", "我想听《{title}》。", "放一首《{title}》。", "可以放《{title}》吗？"),
        ),
        ("Now playing {title}.", "正在放《{title}》。"),
        ("I could not play {title}.", "我没能放《{title}》。"),
    ),
    Tool(
        "convert_money",
        "Convert money",
        (("amount", "amount"), ("from", "money"), ("to", "money")),
        (("result", "amount"),),
        (
            (
                "How many {to} are {amount} {from}?",
                "Convert {amount} {from} to {to}.",
                "Change {amount} {from} into {to}.",
                "What are {amount} {from} in {to}?",
                "I have {amount} {from}. How much is that in {to}?",
                "How much are {amount} {from} in {to}?",
            ),
            (
                "{amount}{from}是多少{to}？",
                "请把{amount}{from}换成{to}。",
                "我有{amount}{from}，换成{to}是多少？",
                "{amount}{from}等于多少{to}？",
            ),
        ),
        ("That is {result} {to}.", "那是{result}{to}。"),
    ),
    Tool(
        "get_price",
        "Price of an item",
        (("item", "item"),),
        (("price", "price"),),
        (
            (
                "What does the {item} cost?",
                "How much is the {item}?",
                "What is the price of the {item}?",
                "Tell me the price of the {item}.",
                "How much do I pay for the {item}?",
                "I want to buy the {item}. What does it cost?",
            ),
            ("{item}多少钱？", "{item}的价格是多少？", "请告诉我{item}的价格。", "我想买{item}，要多少钱？"),
        ),
        ("The {item} costs {price} euros.", "{item}要{price}欧元。"),
    ),
    Tool(
        "turn_on",
        "Turn on a device",
        (("device", "device"),),
        (("ok", "ok"),),
        (
            (
                "Turn on the {device}.",
                "Switch on the {device}.",
                "Please turn the {device} on.",
                "Switch the {device} on, please.",
                "The {device} is off. Turn it on.",
                "Can you turn on the {device}?",
            ),
            ("打开{device}。", "请打开{device}。", "把{device}打开。", "{device}没开，请打开。"),
        ),
        ("The {device} is on.", "{device}打开了。"),
        ("I could not turn on the {device}.", "我没能打开{device}。"),
    ),
    Tool(
        "turn_off",
        "Turn off a device",
        (("device", "device"),),
        (("ok", "ok"),),
        (
            (
                "Turn off the {device}.",
                "Switch off the {device}.",
                "Please turn the {device} off.",
                "Switch the {device} off, please.",
                "The {device} is still on. Turn it off.",
                "Can you turn off the {device}?",
            ),
            ("关掉{device}。", "请关掉{device}。", "把{device}关掉。", "{device}还开着，请关掉。"),
        ),
        ("The {device} is off.", "{device}关掉了。"),
        ("I could not turn off the {device}.", "我没能关掉{device}。"),
    ),
    Tool(
        "search_books",
        "Find a book by its author",
        (("author", "name"),),
        (("title", "title"),),
        (
            (
                "Find a book by {author}.",
                "Which book did {author} write?",
                "Search for a book by {author}.",
                "I want to read a book by {author}.",
                "Is there a book by {author}?",
                "Show me a book by {author}.",
            ),
            ("请找一本{author}写的书。", "{author}写了什么书？", "我想读{author}的书。", "有没有{author}写的书？"),
        ),
        ("{author} wrote {title}.", "{author}写了《{title}》。"),
    ),
    Tool(
        "get_distance",
        "Distance of two cities",
        (("from", "city"), ("to", "city")),
        (("km", "distance"),),
        (
            (
                "How far is it from {from} to {to}?",
                "What is the distance from {from} to {to}?",
                "How many kilometres is it from {from} to {to}?",
                "Tell me the distance from {from} to {to}.",
                "I am in {from}. How far is it to {to}?",
                "How long is the way from {from} to {to}?",
            ),
            (
                "从{from}到{to}有多远？",
                "{from}到{to}有多少公里？",
                "请告诉我从{from}到{to}有多远。",
                "我在{from}，到{to}有多远？",
            ),
        ),
        ("It is {km} km from {from} to {to}.", "从{from}到{to}有{km}公里。"),
    ),
    Tool(
        "find_train",
        "Next train",
        (("from", "city"), ("to", "city")),
        (("time", "time"),),
        (
            (
                "When is the next train from {from} to {to}?",
                "Find a train from {from} to {to}.",
                "When does the train from {from} to {to} leave?",
                "I want to take the train from {from} to {to}.",
                "Is there a train from {from} to {to}?",
                "Tell me the next train from {from} to {to}.",
            ),
            (
                "从{from}到{to}的火车几点开？",
                "请找一下从{from}到{to}的火车。",
                "我要坐火车从{from}到{to}。",
                "有没有从{from}到{to}的火车？",
            ),
        ),
        ("The train from {from} to {to} leaves at {time}.", "从{from}到{to}的火车{time}开。"),
    ),
    Tool(
        "add_note",
        "Write a note",
        (("text", "text"),),
        (("ok", "ok"),),
        (
            (
                "Make a note: {text}",
                "Write a note: {text}",
                "Note: {text}",
                "Please note: {text}",
                "Add a note: {text}",
                "Write this down: {text}",
            ),
            ("记下来：{text}", "请记下：{text}", "写一条笔记：{text}", "加一条笔记：{text}"),
        ),
        ("I wrote the note.", "我记下来了。"),
        ("I could not write the note.", "我没能记下来。"),
    ),
    Tool(
        "get_phone",
        "Phone number of a person",
        (("name", "name"),),
        (("phone", "phone"),),
        (
            (
                "What is {name}'s phone number?",
                "Give me the phone number of {name}.",
                "Find {name}'s phone number.",
                "I need the phone number of {name}.",
                "Which phone number does {name} have?",
                "How can I call {name}? I need the number.",
            ),
            ("{name}的电话是多少？", "请告诉我{name}的电话。", "我要{name}的电话。", "请找一下{name}的电话。"),
        ),
        ("{name}'s phone number is {phone}.", "{name}的电话是{phone}。"),
    ),
    Tool(
        "set_heating",
        "Set the heating",
        (("degrees", "warmth"),),
        (("ok", "ok"),),
        (
            (
                "Set the heating to {degrees} degrees.",
                "I want {degrees} degrees in the room.",
                "Make the room {degrees} degrees warm.",
                "Please heat the room to {degrees} degrees.",
                "The room should have {degrees} degrees.",
                "Heating to {degrees} degrees, please.",
            ),
            (
                "请把房间调到{degrees}度。",
                "房间要{degrees}度。",
                "我想要房间{degrees}度。",
                "请把暖气调到{degrees}度。",
            ),
        ),
        ("The heating is set to {degrees} degrees.", "暖气调到{degrees}度了。"),
        ("I could not set the heating.", "我没能调暖气。"),
    ),
    Tool(
        "add_to_list",
        "Put an item on the shopping list",
        (("item", "item"),),
        (("count", "small"),),
        (
            (
                "Put {item} on the shopping list.",
                "Add {item} to the shopping list.",
                "Write {item} on my shopping list.",
                "The shopping list needs one more thing: {item}",
                "Please put {item} on my shopping list.",
                "One more item for the shopping list: {item}",
            ),
            ("把{item}加到购物清单。", "购物清单加上{item}。", "请把{item}写到购物清单上。", "购物清单还要{item}。"),
        ),
        ("The shopping list now has {count} items.", "购物清单现在有{count}个东西。"),
    ),
    Tool(
        "buy_ticket",
        "Buy a train ticket",
        (("city", "city"), ("day", "day")),
        (("seat", "small"),),
        (
            (
                "Buy a ticket to {city} for {day}.",
                "I need a ticket to {city} on {day}.",
                "Please get me a ticket to {city} for {day}.",
                "A ticket to {city} on {day}, please.",
                "I want to go to {city} on {day}. Buy a ticket.",
                "On {day} I travel to {city}. Get me a ticket.",
            ),
            (
                "请买一张{day}去{city}的票。",
                "我要一张{day}去{city}的票。",
                "我{day}去{city}，请买票。",
                "买一张去{city}的票，{day}走。",
            ),
        ),
        ("Your seat to {city} on {day} is {seat}.", "你{day}去{city}的座位是{seat}号。"),
    ),
)

ALONE = (ADD, MULTIPLY, TRANSLATE)
"""Tools for things that the model can also do without a tool, so that it never answers "I have no tool" to them."""

NO_TOOL = ("I have no tool for that.", "我没有可用的工具。")

PLAIN: tuple[Skill, ...] = (persona.identity, geography.capital, words.opposite, words.plural)
"""Skills that need no tool."""


def tool_call(rng: Random, split: Split) -> Conversation:
    """A question for one of the tools, and the call."""
    language, offered, messages = begin(rng, split)
    use = draw_use(rng, split, offered, language)
    return Conversation([*messages, *use.request], use.call_key, Check.CALL, schemas(offered))


def tool_answer(rng: Random, split: Split) -> Conversation:
    """A question, the call, its result, and the answer."""
    language, offered, messages = begin(rng, split)
    use = draw_use(rng, split, offered, language)
    return Conversation([*messages, *use.request, *use.reply], use.answer_key, tools=schemas(offered))


def tool_none(rng: Random, split: Split) -> Conversation:
    """A question that needs no tool, or one for a tool that is not offered."""
    language, offered, messages = begin(rng, split)
    turn, key = (plain if rng.random() < PLAIN_SHARE else missing)(rng, split, offered, language)
    return Conversation([*messages, *turn], key, tools=schemas(offered))


def begin(rng: Random, split: Split) -> tuple[int, list[Tool], list[Message]]:
    """Language, offered tools, and turns of any kind before the graded one."""
    language = CHINESE if is_chinese(rng, CHINESE_SHARE) else ENGLISH
    offered = rng.sample(TOOLS, rng.randint(1, MOST_OFFERED))
    while not any(has_uses(split, TOOLS.index(tool), language) for tool in offered):
        offered = rng.sample(TOOLS, rng.randint(1, MOST_OFFERED))
    messages: list[Message] = []
    for _ in range(rng.randint(0, MOST_BEFORE if split is Split.TRAIN else 1)):
        if rng.random() < 0.5:
            use = draw_use(rng, split, offered, language)
            messages += use.request + use.reply
        else:
            messages += one_of(rng, (plain, missing))(rng, split, offered, language)[0]
    return language, offered, messages


def plain(rng: Random, split: Split, offered: Sequence[Tool], language: int) -> tuple[list[Message], str]:
    """A question that needs no tool, with its answer, and its key."""
    made = one_of(rng, PLAIN)(rng, split)
    messages = [user(made.user), assistant(made.answer)] if isinstance(made, Exchange) else made.messages
    return messages, f"plain {made.key}"


def missing(rng: Random, split: Split, offered: Sequence[Tool], language: int) -> tuple[list[Message], str]:
    """A question for a tool that is not offered, with its answer, and its key."""
    needed = [tool for tool in TOOLS if tool not in ALONE and tool not in offered]
    if split is Split.HELD_OUT:
        needed = [tool for tool in needed if tool.name not in UNGRADED]
    use = draw_use(rng, split, needed, language)
    return [user(use.question), assistant(NO_TOOL[language])], f"missing {use.call_key}"


def draw_use(rng: Random, split: Split, tools: Sequence[Tool], language: int) -> Use:
    """Draw a use of one of the tools. All skills hold out the same arguments of a function."""
    return split.draw(lambda: make_use(rng, tools, language), key=lambda use: use.held_out)


@functools.cache
def has_uses(split: Split, number: int, language: int) -> bool:
    """True if any arguments of a tool belong to this split. If a tool has few, all may belong to the other split."""
    rng = Random(number)
    return any(split.owns(*make_use(rng, [TOOLS[number]], language).held_out) for _ in range(500))


def make_use(rng: Random, tools: Sequence[Tool], language: int) -> Use:
    chosen = one_of(rng, tools)
    arguments = draw_values(rng, chosen.parameters, language)
    while len(set(arguments.values())) < len(arguments):
        arguments = draw_values(rng, chosen.parameters, language)
    result = chosen.compute(arguments) if chosen.compute else draw_values(rng, chosen.results, language)
    question = one_of(rng, chosen.asks[language]).format(**arguments)
    answers = chosen.failures if result.get("ok") is False else chosen.answers
    return Use(chosen, question, arguments, result, answers[language].format(**arguments, **result))


def draw_values(rng: Random, pools: Sequence[tuple[str, str]], language: int) -> dict[str, Any]:
    return {name: one_of(rng, POOLS[values][language]) for name, values in pools}


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool.schema for tool in tools]


SKILLS: dict[str, Skill] = {"tool call": tool_call, "tool answer": tool_answer, "no tool": tool_none}
