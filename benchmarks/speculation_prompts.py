"""Conversations of ``speculation.py``: first messages by kind of work, made of the project's own files and of short
texts."""

from __future__ import annotations

import json
import random
from itertools import permutations, product
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNT = 192
"""Number of different messages of each kind."""
EDITS = [
    "Add a docstring to each function. Return the whole file.",
    "Rename the first function to `main_function`, everywhere. Return the whole file.",
    "Replace all single-letter names by longer names. Return the whole file.",
    "Add a comment above each `return`. Return the whole file.",
]
NAMES = "Anna Boris Chen Dalia Emil Fatima Georg Hana Ivan Julia Karim Lena Mona Nils Olga Pedro".split()
CITIES = "Paris Lima Oslo Cairo Kyoto Quito Delhi Rome Accra Bern Dublin Hanoi".split()
TOPICS = [
    "rice", "bread", "coffee", "sleep", "the sky", "the moon", "money", "banks", "cats", "a small garden",
    "headaches", "the guitar", "Python", "the sea", "bicycles", "volcanoes", "the Roman Empire", "electric cars",
    "vaccines", "honey", "chess", "snow", "old books", "tea", "running", "paper", "glass", "clouds", "ants",
    "trains", "bridges", "batteries", "salt", "dreams", "languages", "maps", "forests", "music", "steel", "apples",
    "whales", "deserts", "radios", "mirrors", "clocks", "potatoes", "silk", "earthquakes",
]  # fmt: skip
QUESTIONS = [
    "What should everybody know about {}?",
    "Explain {} to a child.",
    "What are three common mistakes of people who talk about {}, and why are they wrong?",
    "I have to give a short talk about {}. What should I say?",
]
KINDS = "customers employees suppliers patients drivers students authors players books films rivers hotels".split()
FIELDS = ['"id", "name", "city", "email" and "active"', '"key", "title", "year" and "price"', '"name", "size", "tags"']


def code_edits(characters: int) -> list[str]:
    """Requests to change a file of this project and to return all of it."""
    files = [path.read_text()[:characters] for path in sorted((ROOT / "src").rglob("*.py"))]
    files = [text for text in files if len(text) > characters // 2]
    return [f"{EDITS[i % len(EDITS)]}\n\n```python\n{text}\n```" for i, text in enumerate(files)]


def documents(characters: int, task: str) -> list[str]:
    """Requests about a part of one of the project's documents."""
    texts = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")) if "zh" not in path.parts]
    parts = [text[start : start + characters] for text in texts for start in range(0, len(text), characters)]
    return [f"{part}\n\n{task}" for part in parts if len(part) == characters]


def json_records() -> list[str]:
    """Requests for a list of similar JSON objects."""
    return [
        f'Write a JSON list of ten {kind} of {city}. Each has the keys {fields}. Begin with [{{"'
        for kind, city, fields in product(KINDS, CITIES, FIELDS)
    ]


def tool_loops() -> list[str]:
    """The next step of an agent that has called tools before, written as text so that any model can read it."""
    prompts = []
    for name, city in product(NAMES, CITIES):
        calls = [
            f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': {'city': one}})}</tool_call>\n"
            f"<tool_response>{json.dumps({'city': one, 'temperature': 10 + len(one), 'sky': 'clear'})}</tool_response>"
            for one in CITIES
            if one != city
        ]
        task = "wants to know the weather in all cities. Repeat all calls and responses so far, then call for"
        prompts.append("\n".join([*calls, f"{name} {task} {city}."]))
    return prompts


def conversations(characters: int = 2400) -> dict[str, list[str]]:
    """``COUNT`` different first messages by kind of work, in a fixed random order. Files and documents are cut after
    ``characters``, texts to translate after a sixth of that."""
    quote = "List the five most important sentences of this document. Quote each sentence word for word."
    translate = "Translate this text to French."
    kinds = {
        "code edit": code_edits(characters),
        "quotes": documents(characters, quote),
        "JSON": json_records(),
        "tool loop": tool_loops(),
        "chat": [question.format(topic) for question, topic in product(QUESTIONS, TOPICS)],
        "translation": documents(characters // 6, translate),
        "story": [f"Tell me a long story about {one} and {other}." for one, other in permutations(TOPICS, 2)],
    }
    for texts in kinds.values():
        random.Random(0).shuffle(texts)
    return {kind: texts[:COUNT] for kind, texts in kinds.items()}


def token_prompts(kind: str, vocab_size: int, length: int) -> list[list[int]]:
    """Prompts for the worst case: ``random`` tokens, or ``near repetitions``: 31 tokens that repeat, each time followed
    by another one, so that long matches end in a wrong draft."""
    source, prompts = random.Random(0), list[list[int]]()
    for _ in range(COUNT):
        block = [source.randrange(vocab_size // 2, vocab_size) for _ in range(31)]
        prompt = list[int]()
        while len(prompt) < length:
            prompt += block if kind == "near repetitions" else []
            prompt.append(source.randrange(1000, vocab_size))
        prompts.append(prompt[:length])
    return prompts


WORST_CASES = ("random", "near repetitions")
