"""Skills about countries: capitals and continents."""

from __future__ import annotations

from collections import Counter
from random import Random

from .base import Exchange, Skill, Split, is_chinese, one_of
from .facts import CHINESE_SHARE, ask, capitalised
from .world import COUNTRIES, Country

# Every fifth wording of a list (the last of each row of five) is held out.

CAPITAL_EN = (
    "What is the capital of {country}?",
    "Tell me the capital of {country}.",
    "capital of {country}?",
    "Which city is the capital of {country}?",
    "Can you tell me which city is the capital of {country}?",
    "What's the capital of {country}?",
    "I am learning about {country}. What is its capital?",
    "Name the capital of {country}.",
    "Do you know the capital of {country}?",
    "Please name the capital city of {country}.",
    "What is the capital city of {country}?",
    "Can you tell me the capital of {country}?",
    "{Country}: what is the capital?",
    "I would like to know the capital of {country}.",
    "I am learning about {country}. Which city is its capital?",
    "Which city is the capital city of {country}?",
    "Please tell me what the capital of {country} is.",
    "My friend is from {country}. What is the capital of that country?",
    "what is the capital of {country}",
    "Do you know what the capital of {country} is?",
    "The capital of {country} is which city?",
    "I am writing a text about {country}. Which city is the capital?",
    "Give me the name of the capital of {country}.",
    "A question about {country}: what is its capital city?",
    "I have a question about {country}. What is the name of its capital?",
)
CAPITAL_ZH = (
    "{country}的首都是哪里？",
    "请告诉我{country}的首都。",
    "{country}的首都是什么？",
    "{country}的首都是哪座城市？",
    "请告诉我{country}的首都是哪里。",
    "你知道{country}的首都是哪里吗？",
    "{country}首都是哪？",
    "哪座城市是{country}的首都？",
    "我在学习{country}的知识，它的首都是哪里？",
    "我想知道哪座城市是{country}的首都。",
    "我想知道{country}的首都是哪里。",
    "请问{country}的首都是哪里？",
    "{country}的首都叫什么？",
    "说出{country}的首都。",
    "请问{country}的首都叫什么名字？",
    "哪个城市是{country}的首都？",
    "我的朋友来自{country}，那个国家的首都是哪里？",
    "请说出{country}首都的名字。",
    "能告诉我{country}的首都吗？",
    "你知道哪个城市是{country}的首都吗？",
    "{country}的首都是哪个城市？",
    "我有一个问题：{country}的首都是哪里？",
    "我要去{country}，它的首都叫什么名字？",
    "请问，哪座城市是{country}的首都？",
    "能告诉我{country}的首都是哪座城市吗？",
)
COUNTRY_EN = (
    "Which country has {capital} as its capital?",
    "{capital} is the capital of which country?",
    "Of which country is {capital} the capital?",
    "Tell me which country has the capital {capital}.",
    "Can you tell me which country has {capital} as its capital?",
    "What country is {capital} the capital of?",
    "Which country's capital is {capital}?",
    "Name the country whose capital is {capital}.",
    "{capital} is the capital of what country?",
    "Please name the country that has {capital} as its capital.",
    "The capital is {capital}. Which country is it?",
    "Do you know which country has {capital} as its capital?",
    "I am learning about {capital}. Which country is it the capital of?",
    "I know that {capital} is a capital, but of which country?",
    "Do you know of which country {capital} is the capital?",
    "Which country is {capital} the capital of?",
    "My friend is from {capital}, a capital city. Which country is it the capital of?",
    "Please tell me the country whose capital is {capital}.",
    "{capital}: capital of which country?",
    "Which country is it whose capital is {capital}?",
    "which country has the capital {capital}",
    "What is the country whose capital is {capital}?",
    "I would like to know which country has {capital} as its capital.",
    "A question about {capital}: which country is it the capital of?",
    "I have a question. {capital} is the capital city of which country?",
)
COUNTRY_ZH = (
    "{capital}是哪个国家的首都？",
    "哪个国家的首都是{capital}？",
    "请告诉我{capital}是哪个国家的首都。",
    "你知道{capital}是哪个国家的首都吗？",
    "你知道哪个国家的首都是{capital}吗？",
    "请问{capital}是哪国的首都？",
    "{capital}是哪国首都？",
    "哪国的首都是{capital}？",
    "首都是{capital}的国家是哪个？",
    "请说出首都是{capital}的国家。",
    "我想知道{capital}是哪个国家的首都。",
    "我在学习{capital}的知识，它是哪个国家的首都？",
    "哪个国家的首都叫{capital}？",
    "请说出以{capital}为首都的国家。",
    "我有一个问题：哪个国家的首都是{capital}？",
    "能告诉我{capital}是哪个国家的首都吗？",
    "我的朋友来自首都{capital}，那是哪个国家？",
    "哪个国家以{capital}为首都？",
    "我有一个问题：{capital}是哪国的首都？",
    "能告诉我哪个国家以{capital}为首都吗？",
    "首都叫{capital}的是哪个国家？",
    "请问哪个国家的首都是{capital}？",
    "{capital}这座城市是哪个国家的首都？",
    "说出首都叫{capital}的国家。",
    "我要去首都{capital}，它是哪个国家的首都？",
)
CONTINENT_EN = (
    "Which continent is {country} in?",
    "On which continent is {country}?",
    "What continent is {country} in?",
    "Tell me which continent {country} is in.",
    "Can you tell me which continent {country} is in?",
    "In which continent is {country}?",
    "{Country} is in which continent?",
    "Name the continent of {country}.",
    "Do you know which continent {country} is in?",
    "Please name the continent that {country} is in.",
    "What is the continent of {country}?",
    "I am learning about {country}. Which continent is it in?",
    "continent of {country}?",
    "Which continent does {country} belong to?",
    "Do you know the continent of {country}?",
    "Please tell me the continent that {country} is in.",
    "{Country}: which continent?",
    "My friend is from {country}. Which continent is that country in?",
    "I would like to know which continent {country} is in.",
    "I am learning about {country}. What continent does it belong to?",
    "what continent is {country} in",
    "Which part of the world is {country} in, Africa, Asia, Europe, North America, South America or Oceania?",
    "Can you name the continent of {country}?",
    "A question about {country}: which continent is it in?",
    "I have a question about {country}. On which continent is that country?",
)
CONTINENT_ZH = (
    "{country}在哪个洲？",
    "{country}位于哪个洲？",
    "请告诉我{country}在哪个洲。",
    "{country}属于哪个洲？",
    "你知道{country}属于哪个洲吗？",
    "你知道{country}在哪个洲吗？",
    "{country}在哪个大洲？",
    "请问{country}在哪个洲？",
    "我想知道{country}在哪个洲。",
    "请问{country}属于哪个大洲？",
    "{country}是哪个洲的国家？",
    "我在学习{country}的知识，它在哪个洲？",
    "请说出{country}所在的洲。",
    "{country}在什么洲？",
    "我有一个问题：{country}位于哪个洲？",
    "{country}所在的洲是哪个？",
    "能告诉我{country}在哪个洲吗？",
    "我的朋友来自{country}，那个国家在哪个洲？",
    "{country}这个国家在哪个大洲？",
    "能告诉我{country}是哪个洲的国家吗？",
    "{country}位于什么洲？",
    "我有一个问题：{country}属于哪个洲？",
    "我要去{country}，它在哪个洲？",
    "哪个洲有{country}这个国家？",
    "我想知道{country}这个国家位于哪个大洲。",
)


def _with_own_capital() -> tuple[Country, ...]:
    """Countries whose capital's name differs from their own name and from all other capitals, in both languages."""
    seen = Counter(name for country in COUNTRIES for name in (country.capital, country.capital_zh))
    return tuple(
        country
        for country in COUNTRIES
        if country.capital != country.name and seen[country.capital] == seen[country.capital_zh] == 1
    )


ONE_TO_ONE = _with_own_capital()


def capital(rng: Random, split: Split) -> Exchange:
    """The capital of a country."""
    country = one_of(rng, COUNTRIES)
    if is_chinese(rng, CHINESE_SHARE):
        answer = f"{country.name_zh}的首都是{country.capital_zh}。"
        return ask(rng, split, "capital:zh", CAPITAL_ZH, answer, country=country.name_zh)
    answer = f"The capital of {country.in_text} is {country.capital}."
    return ask(rng, split, "capital:en", CAPITAL_EN, answer, country=country.in_text)


def country_of_capital(rng: Random, split: Split) -> Exchange:
    """The country of a capital."""
    country = one_of(rng, ONE_TO_ONE)
    if is_chinese(rng, CHINESE_SHARE):
        answer = f"{country.capital_zh}是{country.name_zh}的首都。"
        return ask(rng, split, "country:zh", COUNTRY_ZH, answer, capital=country.capital_zh)
    answer = f"{country.capital} is the capital of {country.in_text}."
    return ask(rng, split, "country:en", COUNTRY_EN, answer, capital=country.capital)


def continent(rng: Random, split: Split) -> Exchange:
    """The continent of a country."""
    country = one_of(rng, COUNTRIES)
    if is_chinese(rng, CHINESE_SHARE):
        answer = f"{country.name_zh}在{country.continent_zh}。"
        return ask(rng, split, "continent:zh", CONTINENT_ZH, answer, country=country.name_zh)
    answer = f"{capitalised(country.in_text)} is in {country.continent}."
    return ask(rng, split, "continent:en", CONTINENT_EN, answer, country=country.in_text)


SKILLS: dict[str, Skill] = {
    "capital": capital,
    "country of capital": country_of_capital,
    "continent": continent,
}
