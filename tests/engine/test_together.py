"""Pairs and larger sets of request options: each gives the same result alone and in a batch, or is refused by name."""

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

NUM_SETS = int(os.environ.get("PENSTOCK_TOGETHER_HEAPS", "20"))
"""Number of random sets of three to seven features, which are tested in addition to all pairs."""
MESSAGE = {"role": "user", "content": "Tell me about Anna, who lives in Paris."}
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
        "messages": [MESSAGE, {"role": "assistant", "content": "Anna lives"}],
        "continue_final_message": True,
    },
    "cut prompt": {"truncate_prompt_tokens": 20},
}
CONSTRAINTS = ("json", "regex", "choice", "forced call")
RANDOM = ("sampled", "truncated")
FORBIDDEN: dict[frozenset[str], str] = {
    **{
        frozenset(pair): "another constraint|one constraint|set exactly one of"
        for pair in itertools.combinations(CONSTRAINTS, 2)
    },
    **{
        frozenset((constraint, other)): EXCLUSIVE["guided_decoding"][i] + "|tool_choice"
        for constraint in CONSTRAINTS
        for i, other in ((0, "allowed"), (1, "bad words"), (3, "least"), (4, "no end"))
    },
    frozenset(("limited thought", "allowed")): "allowed_token_ids",
    frozenset(("limited thought", "bad words")): "bad_words",
    frozenset(("beams", "sampled")): "temperature",
    frozenset(("beams", "truncated")): "temperature",
    frozenset(("beams", "stop")): "stop",
    frozenset(("beams", "logprobs")): "logprobs",
}
"""Incompatible pairs of features → pattern of the error message."""
MAX_TOKENS = 40
"""Maximum number of tokens of an answer."""


def body(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the request body for a set of features."""
    made: dict[str, Any] = {"model": "default", "messages": [MESSAGE], "max_tokens": MAX_TOKENS, "temperature": 0}
    if "best of" in names and "beams" not in names:
        made |= {"temperature": 0.7, "seed": 5}
    for name in sorted(names, key=lambda name: name == "thought"):  # "thought" is applied last
        made |= {key: value for key, value in FEATURES[name].items() if name != "beams" or key != "temperature"}
    return made


def refusals(names: tuple[str, ...]) -> list[str]:
    """Return the patterns of possible error messages for a set of features; empty if the set is allowed."""
    return [message for pair in itertools.combinations(names, 2) if (message := FORBIDDEN.get(frozenset(pair)))]


def random_sets(rng: Random) -> Iterator[tuple[str, ...]]:
    for _ in range(NUM_SETS):
        yield tuple(rng.sample(sorted(FEATURES), rng.randint(3, 7)))


REQUESTS = [*itertools.combinations(FEATURES, 2), *random_sets(Random(0))]


@pytest.fixture(scope="module")
def sailor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(demo.CHAT, tmp_path_factory.mktemp("sailor"), r=4, target_modules=["q_proj", "down_proj"])


async def not_streamed(client: openai.AsyncOpenAI, request: dict[str, Any]) -> Any:
    """Return the choices of an answer, in the same form as ``streamed``."""
    answer = (await client.chat.completions.create(**split(request))).model_dump()
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


async def streamed(client: openai.AsyncOpenAI, request: dict[str, Any]) -> Any:
    found: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(**split(request), stream=True):
        for choice in chunk.model_dump()["choices"]:
            empty: dict[str, Any] = {"content": "", "thought": "", "calls": [], "logprobs": [], "ids": []}
            result = found.setdefault(choice["index"], empty)
            delta = choice["delta"]
            result["content"] += delta.get("content") or ""
            result["thought"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(result["calls"]):
                    result["calls"].append(("", ""))
                name, arguments = result["calls"][call["index"]]
                new = call["function"]
                result["calls"][call["index"]] = (name + (new.get("name") or ""), arguments + (new["arguments"] or ""))
            result["reason"] = choice["finish_reason"]
            result["logprobs"] += [(p["token"], p["logprob"]) for p in (choice["logprobs"] or {}).get("content") or ()]
            result["ids"] += choice.get("token_ids") or []
    return [found[index] for index in sorted(found)]


def split(request: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the client's method. Fields that OpenAI does not define are put into ``extra_body``."""
    known = (
        "model messages max_tokens temperature n seed top_p stop presence_penalty frequency_penalty logit_bias "
        "logprobs top_logprobs tools tool_choice parallel_tool_calls response_format"
    ).split()
    arguments = {name: value for name, value in request.items() if name in known}
    return arguments | {"extra_body": {name: value for name, value in request.items() if name not in known}}


async def answers(server: Served, ask: Callable[..., Any], concurrency: int) -> list[Any]:
    """Return the choices for each request, or the error message if it is refused."""
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)
    window = asyncio.Semaphore(concurrency)

    async def send(names: tuple[str, ...]) -> Any:
        async with window:
            try:
                return await ask(client, body(names))
            except openai.BadRequestError as error:
                return f"{error.param}: {error}"

    return await asyncio.gather(*map(send, REQUESTS))


@pytest.fixture(scope="module")
def alone(sailor: Path) -> list[Any]:
    """Results of requests sent one at a time, not streamed, with a large KV cache. The block size equals that of the
    other server, because it determines the order of sums in attention."""
    flags = ["--num-gpu-blocks-override", "400", "--block-size", "16", "--max-model-len", "512"]
    with Served("--lora-modules", f"sailor={sailor}", *flags) as server:
        return asyncio.run(answers(server, not_streamed, 1))


@pytest.mark.slow
def test_compatible_options_give_same_result_in_any_batch(alone: list[Any], sailor: Path) -> None:
    """Requests are streamed, 48 at a time, with short prefill chunks, drafts, and a KV cache so small that sequences
    are preempted."""
    drafting = json.dumps({"method": "ngram", "adaptive": False})
    flags = ["--num-gpu-blocks-override", "36", "--block-size", "16", "--max-model-len", "512"]
    flags += ["--max-num-batched-tokens", "96", "--max-waiting", "1024", "--speculative-config", drafting]
    with Served("--lora-modules", f"sailor={sailor}", *flags) as server:
        together = asyncio.run(answers(server, streamed, 48))
        page = urllib.request.urlopen(f"{server.root}/metrics").read().decode()
    for names, expected, found in zip(REQUESTS, alone, together, strict=True):
        assert expected == found, names
    assert float(re.search(r"num_preemptions_total\{[^}]*\} (\S+)", page)[1]) > 0  # type: ignore[index]


def test_incompatible_options_are_refused_by_name(alone: list[Any]) -> None:
    for names, found in zip(REQUESTS, alone, strict=True):
        if expected := refusals(names):
            assert isinstance(found, str) and any(re.search(message, found) for message in expected), (names, found)
        else:
            assert isinstance(found, list), (names, found)


def test_results_have_all_requested_options(alone: list[Any]) -> None:
    for names, choices in zip(REQUESTS, alone, strict=True):
        if isinstance(choices, str):
            continue
        assert len(choices) == (2 if "n" in names else 1), names
        for choice in choices:
            check_choice(names, choice)


def check_choice(names: tuple[str, ...], choice: dict[str, Any]) -> None:
    content, ended = choice["content"], choice["reason"] in ("stop", "tool_calls")
    cut = "stop" in names or "stop tokens" in names or "going on" in names
    called = "tools" in names and choice["calls"]  # with tools, a constrained answer may be calls instead
    if ended:
        for name, arguments in choice["calls"]:
            assert name == "find" and json.loads(arguments)["city"] in ("Paris", "Rome"), (names, choice)
    if ended and not cut and not called:
        if "json" in names:
            assert json.loads(content)["city"] in ("Paris", "Rome"), (names, choice)
        if "regex" in names:
            assert re.fullmatch("[a-z]{3,9}[!?]", content), (names, choice)
        if "choice" in names:
            assert content in FEATURES["choice"]["guided_choice"], (names, choice)
        if "forced call" in names:
            assert len(choice["calls"]) == 1, (names, choice)
    if "stop" in names and "least" not in names:
        assert "\n\n" not in content and "is " not in content, (names, choice)
    if "bad words" in names:
        assert " Anna" not in content and " the " not in content, (names, choice)
    if "logprobs" in names:
        assert choice["logprobs"], (names, choice)
    if "no end" in names and not cut:
        assert choice["reason"] == "length" or choice["calls"], (names, choice)
    if "ids" in names and "least" in names and "stop" not in names:
        assert len(choice["ids"]) >= 6, (names, choice)


def test_documentation_lists_incompatible_options() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    table = text[text.index("## Incompatible options") :]
    for field, others in EXCLUSIVE.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{field}`"))
        assert all(f"`{other}`" in row for other in others if other != "bad_word_ids"), row
