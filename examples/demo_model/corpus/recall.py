"""Recall: questions about facts in a passage, or in earlier turns.

Every answer depends on single words and digits of the context, so that an error in the KV cache gives a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from .base import Conversation, Message, Skill, Split, assistant, is_chinese, one_of, user
from .lexicon import ANIMALS, CITIES, COLOURS, ITEMS, JOBS, NAMES_EN, NAMES_ZH, PLACES

FILLER_SHARE = {Split.TRAIN: 0.15, Split.HELD_OUT: 0.4}
"""Share of sentences without facts in a passage."""
LIST_SHARE = 0.3
OWN_SHARE = 0.6
UPDATE_SHARE = 0.2
ASK_CHANGED_SHARE = 0.7
UNGRADED = ("keeper", "主人", "room", "房间")
"""Kinds of facts that are not asked for in held-out passages, since the model confuses them."""
MOST_QUESTIONS = 20
QUESTION_TOKENS = 33
"""Largest number of tokens of a question with its answer."""
CONTEXT_LEFT = 1995
"""Number of tokens available for passage and questions together."""
CHINESE_SHARE = 0.3

PIECE = re.compile(r"[A-Za-z]+|\S")
AT = frozenset(("market", "school", "station", "harbour", "river", "beach", "farm", "hotel"))
ON = frozenset(("mountain", "bridge"))


class Word(str):
    """Word that templates can format with an article (``{x:a}``), or as a place (``{x:in}``)."""

    def __format__(self, spec: str) -> str:
        if spec == "a":
            return f"{'an' if self[0] in 'aeiou' else 'a'} {self}"
        if spec == "in":
            return f"{'at' if self in AT else 'on' if self in ON else 'in'} the {self}"
        return str(self)


def words(pairs: Sequence[tuple[str, str]]) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """English and Chinese columns of a table of pairs."""
    return tuple(Word(english) for english, _ in pairs), tuple(Word(chinese) for _, chinese in pairs)


ANIMALS_EN, ANIMALS_ZH = words(ANIMALS)
CITIES_EN, CITIES_ZH = words(CITIES)
COLOURS_EN, COLOURS_ZH = words(COLOURS)
ITEMS_EN, ITEMS_ZH = words(ITEMS)
JOBS_EN, JOBS_ZH = words(JOBS)
PLACES_EN, PLACES_ZH = words(PLACES)
PEOPLE_EN, PEOPLE_ZH = tuple(map(Word, NAMES_EN)), tuple(map(Word, NAMES_ZH))
CODES = tuple(Word(str(number)) for number in range(1000, 10_000))
ROOMS = tuple(Word(str(number)) for number in range(101, 1000))


@dataclass(frozen=True)
class Kind:
    """Kind of fact: subjects (``{who}``), values (``{value}``), and wordings of statements, questions and answers."""

    name: str
    values: Sequence[Word]
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    update: str = ""  # states a new value of an earlier fact
    subjects: Sequence[Word] = ()  # empty: the people of the passage
    unique: bool = False  # no two subjects share a value, so that questions can ask for the subject


@dataclass(frozen=True)
class Fact:
    kind: Kind
    who: Word
    value: Word

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind.name, self.who, self.value

    @property
    def claims(self) -> list[tuple[str, ...]]:
        """Keys that no other fact in the same text may have."""
        claims: list[tuple[str, ...]] = [(self.kind.name, self.who)]
        return [*claims, (self.kind.name, "value", self.value)] if self.kind.unique else claims

    @property
    def answer(self) -> str:
        return self.say(self.kind.answer)

    def say(self, template: str) -> str:
        text = template.format(who=self.who, value=self.value)
        return text[0].upper() + text[1:]

    def tell(self, rng: Random) -> str:
        return self.say(one_of(rng, self.kind.tells))

    def ask(self, rng: Random) -> str:
        return self.say(one_of(rng, self.kind.asks))


@dataclass(frozen=True)
class Language:
    """Wordings of one language."""

    name: str
    people: Sequence[Word]
    items: Sequence[Word]
    kinds: tuple[Kind, ...]
    own: tuple[Kind, ...]  # facts about the user
    listing: Kind  # a list of items (``{items}``), asked for by position
    fillers: tuple[str, ...]
    frames: tuple[str, ...]
    acknowledged: tuple[tuple[tuple[str, ...], str], ...]  # user's statements, and the assistant's reply
    space: str
    comma: str


ME = (Word("I"),)

KINDS_EN = (
    Kind(
        "code",
        CODES,
        (
            "{who}'s code is {value}.",
            "The code of {who} is {value}.",
            "{who} has the code {value}.",
            "{who} uses the code {value}.",
        ),
        (
            "What is {who}'s code?",
            "What is the code of {who}?",
            "Which code does {who} use?",
            "Which code does {who} have?",
        ),
        "{who}'s code is {value}.",
        "{who}'s code is now {value}.",
        unique=True,
    ),
    Kind(
        "room",
        ROOMS,
        (
            "{who}'s room is number {value}.",
            "{who} sleeps in room {value}.",
            "{who} has room {value}.",
            "Room {value} is for {who}.",
        ),
        (
            "What is {who}'s room number?",
            "Which room does {who} have?",
            "In which room does {who} sleep?",
            "Tell me {who}'s room number.",
        ),
        "{who} has room {value}.",
        "{who} now has room {value}.",
        unique=True,
    ),
    Kind(
        "keeper",
        ITEMS_EN,
        (
            "{who} keeps the {value}.",
            "The {value} is kept by {who}.",
            "{who} owns the {value}.",
            "The {value} belongs to {who}.",
        ),
        (
            "Who keeps the {value}?",
            "Who owns the {value}?",
            "What does {who} keep?",
            "What does {who} own?",
        ),
        "{who} owns the {value}.",
        unique=True,
    ),
    Kind(
        "colour",
        COLOURS_EN,
        (
            "{who}'s favourite colour is {value}.",
            "The favourite colour of {who} is {value}.",
            "{who} likes the colour {value} best.",
            "{who} likes {value} more than any other colour.",
        ),
        (
            "What is {who}'s favourite colour?",
            "What is the favourite colour of {who}?",
            "Which colour does {who} like best?",
            "Which colour is {who}'s favourite?",
        ),
        "{who}'s favourite colour is {value}.",
        "{who}'s favourite colour is now {value}.",
    ),
    Kind(
        "animal",
        ANIMALS_EN,
        (
            "{who}'s favourite animal is the {value}.",
            "The favourite animal of {who} is the {value}.",
            "{who} likes the {value} more than any other animal.",
            "Of all animals {who} likes the {value} best.",
        ),
        (
            "What is {who}'s favourite animal?",
            "What is the favourite animal of {who}?",
            "Which animal does {who} like best?",
            "Which animal is {who}'s favourite?",
        ),
        "{who}'s favourite animal is the {value}.",
        "{who}'s favourite animal is now the {value}.",
    ),
    Kind(
        "city",
        CITIES_EN,
        (
            "{who} lives in {value}.",
            "{who} has a home in {value}.",
            "The home of {who} is in {value}.",
            "{who}'s home is in {value}.",
        ),
        (
            "Where does {who} live?",
            "In which city does {who} live?",
            "Which city does {who} live in?",
            "Where is the home of {who}?",
        ),
        "{who} lives in {value}.",
        "{who} now lives in {value}.",
    ),
    Kind(
        "job",
        JOBS_EN,
        (
            "{who} is {value:a}.",
            "{who} works as {value:a}.",
            "{who}'s job is {value}.",
            "The job of {who} is {value}.",
        ),
        (
            "What is the job of {who}?",
            "What is {who}'s job?",
            "What does {who} work as?",
            "Which job does {who} have?",
        ),
        "{who} is {value:a}.",
        "{who} now works as {value:a}.",
    ),
    Kind(
        "place",
        PLACES_EN,
        (
            "The {who} is {value:in}.",
            "The {who} is kept {value:in}.",
            "You can find the {who} {value:in}.",
            "The {who} was left {value:in}.",
        ),
        (
            "Where is the {who}?",
            "Where is the {who} kept?",
            "Where can I find the {who}?",
            "In which place is the {who}?",
        ),
        "The {who} is {value:in}.",
        "The {who} is now {value:in}.",
        subjects=ITEMS_EN,
    ),
)

OWN_EN = (
    Kind(
        "my name",
        PEOPLE_EN,
        ("My name is {value}.", "I am {value}.", "I am called {value}.", "You can call me {value}."),
        ("What is my name?", "What am I called?", "Do you know my name?", "Tell me my name."),
        "Your name is {value}.",
        subjects=ME,
    ),
    Kind(
        "my code",
        CODES,
        ("My code is {value}.", "I use the code {value}.", "I have the code {value}.", "{value} is my code."),
        ("What is my code?", "Which code do I use?", "Tell me my code.", "Do you know my code?"),
        "Your code is {value}.",
        "My code is now {value}.",
        subjects=ME,
    ),
    Kind(
        "my colour",
        COLOURS_EN,
        ("My favourite colour is {value}.", "I like the colour {value} best.", "{value} is my favourite colour."),
        ("What is my favourite colour?", "Which colour do I like best?", "Tell me my favourite colour."),
        "Your favourite colour is {value}.",
        "My favourite colour is now {value}.",
        subjects=ME,
    ),
    Kind(
        "my animal",
        ANIMALS_EN,
        ("My favourite animal is the {value}.", "Of all animals I like the {value} best."),
        ("What is my favourite animal?", "Which animal do I like best?", "Tell me my favourite animal."),
        "Your favourite animal is the {value}.",
        "My favourite animal is now the {value}.",
        subjects=ME,
    ),
    Kind(
        "my city",
        CITIES_EN,
        ("I live in {value}.", "My home is in {value}.", "I have a house in {value}."),
        ("Where do I live?", "In which city do I live?", "Where is my home?"),
        "You live in {value}.",
        "I now live in {value}.",
        subjects=ME,
    ),
    Kind(
        "my job",
        JOBS_EN,
        ("I am {value:a}.", "I work as {value:a}.", "My job is {value}."),
        ("What is my job?", "What do I work as?", "Tell me my job."),
        "You are {value:a}.",
        "I now work as {value:a}.",
        subjects=ME,
    ),
)

KINDS_ZH = (
    Kind(
        "密码",
        CODES,
        (
            "{who}的密码是{value}。",
            "{who}的密码为{value}。",
            "{who}用的密码是{value}。",
            "{value}是{who}的密码。",
        ),
        (
            "{who}的密码是多少？",
            "{who}用的密码是多少？",
            "请告诉我{who}的密码。",
        ),
        "{who}的密码是{value}。",
        "{who}的密码现在是{value}。",
        unique=True,
    ),
    Kind(
        "房间",
        ROOMS,
        (
            "{who}的房间是{value}号。",
            "{who}住{value}号房间。",
            "{value}号房间是{who}的。",
            "{who}的房间号是{value}。",
        ),
        (
            "{who}的房间号是多少？",
            "{who}住几号房间？",
            "请告诉我{who}的房间号。",
        ),
        "{who}住{value}号房间。",
        "{who}现在住{value}号房间。",
        unique=True,
    ),
    Kind(
        "主人",
        ITEMS_ZH,
        (
            "{value}是{who}的。",
            "{value}的主人是{who}。",
            "{who}是{value}的主人。",
            "这里的{value}是{who}的。",
        ),
        (
            "{value}是谁的？",
            "谁是{value}的主人？",
            "{value}的主人是谁？",
            "请告诉我{value}是谁的。",
        ),
        "{value}是{who}的。",
        unique=True,
    ),
    Kind(
        "颜色",
        COLOURS_ZH,
        (
            "{who}最喜欢的颜色是{value}。",
            "{who}最喜欢{value}。",
            "{value}是{who}最喜欢的颜色。",
            "在颜色里，{who}最喜欢{value}。",
        ),
        (
            "{who}最喜欢的颜色是什么？",
            "{who}最喜欢什么颜色？",
            "哪种颜色是{who}最喜欢的？",
            "请告诉我{who}最喜欢的颜色。",
        ),
        "{who}最喜欢的颜色是{value}。",
        "{who}现在最喜欢的颜色是{value}。",
    ),
    Kind(
        "动物",
        ANIMALS_ZH,
        (
            "{who}最喜欢的动物是{value}。",
            "{value}是{who}最喜欢的动物。",
            "在动物里，{who}最喜欢{value}。",
            "{who}最爱的动物是{value}。",
        ),
        (
            "{who}最喜欢的动物是什么？",
            "{who}最喜欢什么动物？",
            "哪种动物是{who}最喜欢的？",
            "请告诉我{who}最喜欢的动物。",
        ),
        "{who}最喜欢的动物是{value}。",
        "{who}现在最喜欢的动物是{value}。",
    ),
    Kind(
        "城市",
        CITIES_ZH,
        (
            "{who}住在{value}。",
            "{who}的家在{value}。",
            "{who}家住{value}。",
            "{value}是{who}住的城市。",
        ),
        ("{who}住在哪里？", "{who}的家在哪里？", "{who}住在哪个城市？", "请告诉我{who}住在哪个城市。"),
        "{who}住在{value}。",
        "{who}现在住在{value}。",
    ),
    Kind(
        "工作",
        JOBS_ZH,
        ("{who}是{value}。", "{who}的工作是{value}。", "{who}是一名{value}。", "{who}做{value}很多年了。"),
        ("{who}的工作是什么？", "{who}做什么工作？", "{who}是做什么的？", "请告诉我{who}的工作。"),
        "{who}是{value}。",
        "{who}现在是{value}。",
    ),
    Kind(
        "地方",
        PLACES_ZH,
        ("{who}在{value}。", "{who}放在{value}。", "有人把{who}放在{value}。", "在{value}可以找到{who}。"),
        ("{who}在哪里？", "{who}放在哪里？", "在哪里可以找到{who}？", "请告诉我{who}在哪里。"),
        "{who}在{value}。",
        "{who}现在在{value}。",
        subjects=ITEMS_ZH,
    ),
)

OWN_ZH = (
    Kind(
        "我的名字",
        PEOPLE_ZH,
        ("我叫{value}。", "我的名字是{value}。", "你可以叫我{value}。", "我是{value}。"),
        ("我叫什么？", "我的名字是什么？", "我叫什么名字？", "请告诉我我的名字。"),
        "你叫{value}。",
        subjects=ME,
    ),
    Kind(
        "我的密码",
        CODES,
        ("我的密码是{value}。", "我用的密码是{value}。", "{value}是我的密码。"),
        ("我的密码是多少？", "我用的密码是多少？", "你知道我的密码吗？"),
        "你的密码是{value}。",
        "我的密码现在是{value}。",
        subjects=ME,
    ),
    Kind(
        "我的颜色",
        COLOURS_ZH,
        ("我最喜欢的颜色是{value}。", "我最喜欢{value}。", "{value}是我最喜欢的颜色。"),
        ("我最喜欢的颜色是什么？", "我最喜欢什么颜色？"),
        "你最喜欢的颜色是{value}。",
        "我现在最喜欢的颜色是{value}。",
        subjects=ME,
    ),
    Kind(
        "我的城市",
        CITIES_ZH,
        ("我住在{value}。", "我的家在{value}。", "我家在{value}。"),
        ("我住在哪里？", "我的家在哪里？", "我住在哪个城市？"),
        "你住在{value}。",
        "我现在住在{value}。",
        subjects=ME,
    ),
    Kind(
        "我的工作",
        JOBS_ZH,
        ("我是{value}。", "我的工作是{value}。", "我是一名{value}。"),
        ("我的工作是什么？", "我做什么工作？", "我是做什么的？"),
        "你是{value}。",
        "我现在是{value}。",
        subjects=ME,
    ),
)

LISTING_EN = Kind(
    "list",
    ITEMS_EN,
    (
        "The list is: {items}.",
        "The shopping list is: {items}.",
        "This is the list: {items}.",
        "Somebody wrote a list: {items}.",
        "The list on the wall says: {items}.",
        "The items on the list are: {items}.",
    ),
    (
        "Which item comes {who} in the list?",
        "What is the {who} item of the list?",
        "What is the {who} item in the list?",
        "Which item is {who} on the list?",
        "Tell me the {who} item of the list.",
        "What comes {who} in the list?",
    ),
    "The {who} item is {value}.",
    subjects=tuple(map(Word, ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"))),
)
LISTING_ZH = Kind(
    "清单",
    ITEMS_ZH,
    (
        "清单是：{items}。",
        "购物清单是：{items}。",
        "这是清单：{items}。",
        "清单上写着：{items}。",
        "有人写了一个清单：{items}。",
    ),
    (
        "清单上第{who}个是什么？",
        "清单里的第{who}个东西是什么？",
        "请告诉我清单上的第{who}个东西。",
        "清单上的第{who}个东西是什么？",
    ),
    "第{who}个是{value}。",
    subjects=tuple(map(Word, "一二三四五六七八")),
)

FILLERS_EN = (
    *(
        f"The {time} was {mood}."
        for time in ("morning", "day", "evening", "night")
        for mood in ("cold", "warm", "quiet")
    ),
    "Nothing else happened.",
    "The wind was strong.",
    "The sky was clear.",
    "It was raining again.",
    "There was music in the street.",
    "People talked about the weather.",
    "A child was singing.",
    "Nobody was in a hurry.",
    "The sun was high in the sky.",
    "Everybody was tired.",
    "Then it was quiet again.",
    "The road was long and dry.",
    "Some people waited outside.",
    "The letters came late.",
    "There was snow on the hills.",
    "All of this is true.",
)
FILLERS_ZH = (
    *(f"{time}很{mood}。" for time in ("早上", "白天", "晚上", "昨天") for mood in ("冷", "热", "安静")),
    "风很大。",
    "天上没有云。",
    "又下雨了。",
    "街上有音乐。",
    "大家在说天气。",
    "一个孩子在唱歌。",
    "没有人着急。",
    "太阳很高。",
    "大家都累了。",
    "路很长。",
    "有人在外面等。",
    "信来得很晚。",
    "这些都是真的。",
    "没有别的事。",
)

ENGLISH = Language(
    name="en",
    people=PEOPLE_EN,
    items=ITEMS_EN,
    kinds=KINDS_EN,
    own=OWN_EN,
    listing=LISTING_EN,
    fillers=FILLERS_EN,
    frames=(
        "{text}\n{question}",
        "{text}\n\n{question}",
        "Read the text and answer.\n{text}\n{question}",
        "Here is a text. {text}\nQuestion: {question}",
        "Text: {text}\nQuestion: {question}",
        "Read this: {text}\n{question}",
        "{text}\nNow answer: {question}",
        "I will tell you some facts. {text}\n{question}",
    ),
    acknowledged=(
        (("{facts}", "Listen: {facts}", "You should know this. {facts}", "By the way: {facts}"), "OK."),
        (
            ("Remember this: {facts}", "Please remember: {facts}", "{facts} Please remember that."),
            "I will remember that.",
        ),
    ),
    space=" ",
    comma=", ",
)
CHINESE = Language(
    name="zh",
    people=PEOPLE_ZH,
    items=ITEMS_ZH,
    kinds=KINDS_ZH,
    own=OWN_ZH,
    listing=LISTING_ZH,
    fillers=FILLERS_ZH,
    frames=(
        "{text}\n{question}",
        "{text}\n\n{question}",
        "读下面的文字，然后回答。\n{text}\n{question}",
        "文字：{text}\n问题：{question}",
        "请读：{text}\n{question}",
        "{text}\n请回答：{question}",
        "我告诉你一些事。{text}\n{question}",
    ),
    acknowledged=(
        (("{facts}", "你听：{facts}", "我告诉你：{facts}", "我想说，{facts}"), "好的。"),
        (("请记住：{facts}", "记住这件事：{facts}", "{facts}请记住。"), "我会记住的。"),
    ),
    space="",
    comma="、",
)


def recall_chat(rng: Random, split: Split) -> Conversation:
    """Facts stated over several turns and asked for later; if a fact changes, the latest value counts."""
    language = draw_language(rng)
    kinds = language.kinds + language.own if rng.random() < OWN_SHARE else language.kinds
    cast = rng.sample(language.people, 3)
    taken: set[tuple[str, ...]] = set()
    facts = [draw_fact(rng, split, kinds, cast, taken) for _ in range(rng.randint(2, 5))]
    sentences = [fact.tell(rng) for fact in facts]
    changed = [fact for fact in facts if fact.kind.update and rng.random() < UPDATE_SHARE][:1]
    for fact in changed:
        first = facts.index(fact)
        sentences[first] = earlier(rng, fact).tell(rng)
        sentences.insert(rng.randint(first + 1, len(sentences)), fact.say(fact.kind.update))
    messages = [message for sentence in sentences for message in told(rng, language, sentence)]
    asked = rng.sample(facts, rng.randint(1, min(3, len(facts))))
    if changed and rng.random() < ASK_CHANGED_SHARE:
        asked[-1:] = changed if changed[0] not in asked[:-1] else asked[-1:]
    return Conversation(messages + asking(rng, asked), key=key_of(language, asked[-1]))


def passage(rng: Random, split: Split, tokens: int) -> Conversation:
    """A passage of about ``tokens`` tokens, and questions about it, one per turn."""
    language = draw_language(rng)
    text, facts, listed = tell_passage(rng, split, language, tokens)
    most = min(MOST_QUESTIONS, 3 + tokens // 15, (CONTEXT_LEFT - tokens) // QUESTION_TOKENS) - len(listed)
    asked = listed + rng.sample(facts, min(len(facts), most))
    rng.shuffle(asked)
    messages = asking(rng, asked)
    messages[0] = user(one_of(rng, language.frames).format(text=text, question=messages[0]["content"]))
    return Conversation(messages, key=key_of(language, asked[-1]))


def recall(shortest: int, longest: int) -> Skill:
    """Skill of recalling facts from a passage with a length in this range, in tokens."""

    def skill(rng: Random, split: Split) -> Conversation:
        return passage(rng, split, rng.randint(shortest, longest))

    return skill


def tell_passage(rng: Random, split: Split, language: Language, tokens: int) -> tuple[str, list[Fact], list[Fact]]:
    """Text of a passage, the facts that may be asked for, and the fact of its list, if there is one.

    A small cast gives many facts per person, a large one many persons.
    """
    cast = rng.sample(language.people, min(len(language.people), 3 + tokens // one_of(rng, (20, 40))))
    taken: set[tuple[str, ...]] = set()
    facts: list[Fact] = []
    count = 0
    sentences: list[str] = []
    listed: list[Fact] = []
    if rng.random() < LIST_SHARE:
        fact, sentence = draw_list(rng, split, language)
        listed.append(fact)
        sentences.append(sentence)
    size = sum(map(count_tokens, sentences))
    while size < tokens or not facts + listed:
        if count >= 3 and rng.random() < FILLER_SHARE[split]:
            sentence = one_of(rng, language.fillers)
        else:
            fact = draw_fact(rng, split, language.kinds, cast, taken)
            sentence = fact.tell(rng)
            count += 1
            if split is Split.TRAIN or fact.kind.name not in UNGRADED:
                facts.append(fact)
        sentences.append(sentence)
        size += count_tokens(sentence)
    rng.shuffle(sentences)
    return language.space.join(sentences), facts, listed


def draw_fact(
    rng: Random, split: Split, kinds: Sequence[Kind], cast: Sequence[Word], taken: set[tuple[str, ...]]
) -> Fact:
    """Draw a fact of this split that does not conflict with ``taken``."""

    def free() -> Fact:
        while True:
            kind = one_of(rng, kinds)
            fact = Fact(kind, one_of(rng, kind.subjects or cast), one_of(rng, kind.values))
            if taken.isdisjoint(fact.claims):
                return fact

    fact = split.draw(free, key=lambda fact: fact.key)
    taken.update(fact.claims)
    return fact


def draw_list(rng: Random, split: Split, language: Language) -> tuple[Fact, str]:
    """Draw a list of five to eight items: the fact that may be asked for, and the sentence with the list."""
    kind, length = language.listing, rng.randint(5, 8)

    def make() -> Fact:
        return Fact(kind, one_of(rng, kind.subjects[:length]), one_of(rng, kind.values))

    fact = split.draw(make, key=lambda fact: fact.key)
    items = rng.sample([item for item in kind.values if item != fact.value], length)
    items[kind.subjects.index(fact.who)] = fact.value
    return fact, one_of(rng, kind.tells).format(items=language.comma.join(items))


def earlier(rng: Random, fact: Fact) -> Fact:
    """The same fact with another, earlier value."""
    return replace(fact, value=one_of(rng, [value for value in fact.kind.values if value != fact.value]))


def told(rng: Random, language: Language, facts: str) -> list[Message]:
    wordings, reply = one_of(rng, language.acknowledged)
    return [user(one_of(rng, wordings).format(facts=facts)), assistant(reply)]


def asking(rng: Random, facts: Sequence[Fact]) -> list[Message]:
    return [message for fact in facts for message in (user(fact.ask(rng)), assistant(fact.answer))]


def key_of(language: Language, fact: Fact) -> str:
    return ":".join((language.name, *fact.key))


def draw_language(rng: Random) -> Language:
    return CHINESE if is_chinese(rng, CHINESE_SHARE) else ENGLISH


def count_tokens(text: str) -> int:
    """Estimate the number of tokens: one per word, digit, punctuation mark or Chinese character."""
    return len(PIECE.findall(text))


SKILLS: dict[str, Skill] = {
    "recall in chat": recall_chat,
    "recall to 60": recall(12, 60),
    "recall to 200": recall(60, 200),
    "recall to 700": recall(200, 700),
    "recall to 1500": recall(700, 1500),
    "recall to 2000": recall(1520, 1590),
}
