"""All that a request can ask for, in pairs and in heaps: together it is what it is alone, or it is refused by name."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from repository import ROOT
from serving import Served
from test_lora import adapter

from penstock import demo
from penstock.core.sampling import EXCLUSIVE

HEAPS = int(os.environ.get("PENSTOCK_TOGETHER_HEAPS", "20"))
"""Drawn combinations of three to seven features, besides all pairs."""
ASKED = {"role": "user", "content": "Tell me about Anna, who lives in Paris."}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": CITY}}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
FEATURES: dict[str, dict[str, Any]] = {
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}},
    "regex": {"guided_regex": "[a-z]{3,9}(!|\\?)"},
    "choice": {"guided_choice": ["Paris", "Rome", "Rimini"]},
    "forced call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "tools": {"tools": TOOLS},
    "thought": THINK,
    "limited thought": {**THINK, "reasoning_max_tokens": 5},
    "n": {"n": 2},
    "best of": {"best_of": 3},
    "beams": {"use_beam_search": True, "best_of": 3, "temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 7},
    "truncated": {"temperature": 0.8, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {"100": 3, "200": -3}},
    "least": {"min_tokens": 6},
    "stop": {"stop": ["\n\n", "is "]},
    "stop tokens": {"stop_token_ids": [13, 260]},
    "no end": {"ignore_eos": True},
    "bad words": {"bad_words": ["Anna", "the"]},
    "allowed": {"allowed_token_ids": list(range(100, 1500))},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 1},
    "adapter": {"model": "sailor"},
    "ids": {"return_token_ids": True},
    "salt": {"cache_salt": "mine"},
    "priority": {"priority": -1},
    "going on": {
        "messages": [ASKED, {"role": "assistant", "content": "Anna lives"}],
        "continue_final_message": True,
    },
    "cut prompt": {"truncate_prompt_tokens": 20},
}
FORMS = ("json", "regex", "choice", "forced call")
RANDOM = ("sampled", "truncated")
FORBIDDEN: dict[frozenset[str], str] = {
    **{
        frozenset(pair): "another constraint|one constraint|set exactly one of"
        for pair in itertools.combinations(FORMS, 2)
    },
    **{
        frozenset((form, other)): EXCLUSIVE["guided_decoding"][i] + "|tool_choice"
        for form in FORMS
        for i, other in ((0, "allowed"), (1, "bad words"), (3, "least"), (4, "no end"))
    },
    frozenset(("limited thought", "allowed")): "allowed_token_ids",
    frozenset(("limited thought", "bad words")): "bad_words",
    frozenset(("beams", "sampled")): "temperature",
    frozenset(("beams", "truncated")): "temperature",
    frozenset(("beams", "stop")): "stop",
    frozenset(("beams", "logprobs")): "logprobs",
}
"""Pairs that are refused, and what the refusal says."""
WHOLE = 40
"""Tokens of an answer at most."""


def body(names: tuple[str, ...]) -> dict[str, Any]:
    """A request for all of these."""
    made: dict[str, Any] = {"model": "default", "messages": [ASKED], "max_tokens": WHOLE, "temperature": 0}
    if "best of" in names and "beams" not in names:
        made |= {"temperature": 0.7, "seed": 5}
    for name in sorted(names, key=lambda name: name == "thought"):  # which "limited thought" has, too
        made |= {key: value for key, value in FEATURES[name].items() if name != "beams" or key != "temperature"}
    return made


def refusals(names: tuple[str, ...]) -> list[str]:
    return [words for pair in itertools.combinations(names, 2) if (words := FORBIDDEN.get(frozenset(pair)))]


def heaps(rng: Random) -> Iterator[tuple[str, ...]]:
    for _ in range(HEAPS):
        yield tuple(rng.sample(sorted(FEATURES), rng.randint(3, 7)))


REQUESTS = [*itertools.combinations(FEATURES, 2), *heaps(Random(0))]


@pytest.fixture(scope="module")
def sailor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(demo.CHAT, tmp_path_factory.mktemp("sailor"), r=4, target_modules=["q_proj", "down_proj"])


async def whole(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> Any:
    """Choices, as far as they can be told alike in a stream."""
    answer = (await client.chat.completions.create(**split(asked))).model_dump()
    return [
        {
            "content": choice["message"]["content"] or "",
            "thought": choice["message"].get("reasoning_content") or "",
            "calls": [
                (call["function"]["name"], call["function"]["arguments"])
                for call in choice["message"]["tool_calls"] or ()
            ],
            "reason": choice["finish_reason"],
            "logprobs": [(p["token"], p["logprob"]) for p in (choice["logprobs"] or {}).get("content") or ()],
            "ids": choice.get("token_ids") or [],
        }
        for choice in answer["choices"]
    ]


async def streamed(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> Any:
    found: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(**split(asked), stream=True):
        for choice in chunk.model_dump()["choices"]:
            empty: dict[str, Any] = {"content": "", "thought": "", "calls": [], "logprobs": [], "ids": []}
            own = found.setdefault(choice["index"], empty)
            delta = choice["delta"]
            own["content"] += delta.get("content") or ""
            own["thought"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(own["calls"]):
                    own["calls"].append(("", ""))
                name, arguments = own["calls"][call["index"]]
                new = call["function"]
                own["calls"][call["index"]] = (name + (new.get("name") or ""), arguments + (new["arguments"] or ""))
            own["reason"] = choice["finish_reason"]
            own["logprobs"] += [(p["token"], p["logprob"]) for p in (choice["logprobs"] or {}).get("content") or ()]
            own["ids"] += choice.get("token_ids") or []
    return [found[index] for index in sorted(found)]


def split(asked: dict[str, Any]) -> dict[str, Any]:
    """As the client's method takes it: what OpenAI does not know goes into the body as it is."""
    known = (
        "model messages max_tokens temperature n seed top_p stop presence_penalty frequency_penalty logit_bias "
        "logprobs top_logprobs tools tool_choice parallel_tool_calls response_format"
    ).split()
    own = {name: value for name, value in asked.items() if name in known}
    return own | {"extra_body": {name: value for name, value in asked.items() if name not in known}}


async def answers(server: Served, ask: Callable[..., Any], at_once: int) -> list[Any]:
    """Of every request its choices, or the words of its refusal."""
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)
    window = asyncio.Semaphore(at_once)

    async def one(names: tuple[str, ...]) -> Any:
        async with window:
            try:
                return await ask(client, body(names))
            except openai.BadRequestError as error:
                return f"{error.param}: {error}"

    return await asyncio.gather(*map(one, REQUESTS))


@pytest.fixture(scope="module")
def alone(sailor: Path) -> list[Any]:
    """Whole, one at a time, with all the room there is. The size of blocks decides in which order attention sums."""
    roomy = ["--num-gpu-blocks-override", "400", "--block-size", "16", "--max-model-len", "512"]
    with Served("--lora-modules", f"sailor={sailor}", *roomy) as server:
        return asyncio.run(answers(server, whole, 1))


def test_what_goes_together_is_the_same_in_any_company(alone: list[Any], sailor: Path) -> None:
    """In streams, many at a time, in a cache that is too small for them, in short chunks, with tokens guessed ahead."""
    guessing = json.dumps({"method": "ngram", "adaptive": False})
    pressed = ["--num-gpu-blocks-override", "48", "--block-size", "16", "--max-model-len", "512"]
    pressed += ["--max-num-batched-tokens", "96", "--max-waiting", "1024", "--speculative-config", guessing]
    with Served("--lora-modules", f"sailor={sailor}", *pressed) as server:
        together = asyncio.run(answers(server, streamed, 24))
        page = urllib.request.urlopen(f"{server.root}/metrics").read().decode()
    for names, one, other in zip(REQUESTS, alone, together, strict=True):
        assert one == other, names
    assert float(re.search(r"num_preemptions_total\{[^}]*\} (\S+)", page)[1]) > 0  # type: ignore[index]


def test_what_does_not_go_together_is_refused_by_name(alone: list[Any]) -> None:
    for names, told in zip(REQUESTS, alone, strict=True):
        if expected := refusals(names):
            assert isinstance(told, str) and any(re.search(words, told) for words in expected), (names, told)
        else:
            assert isinstance(told, list), (names, told)


def test_everything_is_as_it_was_asked_for(alone: list[Any]) -> None:
    for names, told in zip(REQUESTS, alone, strict=True):
        if isinstance(told, str):
            continue
        assert len(told) == (2 if "n" in names else 1), names
        for choice in told:
            check(names, choice)


def check(names: tuple[str, ...], choice: dict[str, Any]) -> None:
    said, ended = choice["content"], choice["reason"] in ("stop", "tool_calls")
    cut = "stop" in names or "stop tokens" in names or "going on" in names
    if ended and not cut:
        if "json" in names:
            assert json.loads(said)["city"] in ("Paris", "Rome"), (names, choice)
        if "regex" in names:
            assert re.fullmatch("[a-z]{3,9}[!?]", said), (names, choice)
        if "choice" in names:
            assert said in FEATURES["choice"]["guided_choice"], (names, choice)
        if "forced call" in names:
            ((name, arguments),) = choice["calls"]
            assert name == "find" and json.loads(arguments)["city"] in ("Paris", "Rome"), (names, choice)
    if "stop" in names and "least" not in names:
        assert "\n\n" not in said and "is " not in said, (names, choice)
    if "bad words" in names:
        assert " Anna" not in said and " the " not in said, (names, choice)
    if "logprobs" in names:
        assert choice["logprobs"], (names, choice)
    if "no end" in names and not cut:
        assert choice["reason"] == "length" or choice["calls"], (names, choice)
    if "ids" in names and "least" in names and "stop" not in names:
        assert len(choice["ids"]) >= 6, (names, choice)


def test_the_documents_list_what_does_not_go_together() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    table = text[text.index("## Incompatible options") :]
    for field, others in EXCLUSIVE.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{field}`"))
        assert all(f"`{other}`" in row for other in others if other != "bad_word_ids"), row
