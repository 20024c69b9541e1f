"""Answers of every dialect are the same bytes with the default drafts as with ``--no-speculation``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from serving import Served
from storm import eventually, read_metrics

pytest.importorskip("penstock.ops._kernels", reason="the CPU kernels were not built", exc_type=ImportError)

LIST = "Repeat the list: apple pear plum apple pear plum kiwi apple pear plum"
QUESTIONS = [LIST, "Count from 1 to 20.", "Tell me a story."]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "two"]}, "b": {"enum": ["one", "two"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BARE = {"Authorization": "TOKEN"}
NATIVE = {"temperature": 0, "max_dec_len": 60}


def requests(question: str) -> dict[str, tuple[str, dict[str, str], dict[str, Any]]]:
    """Path, headers and body of a request in each dialect."""
    messages = [{"role": "user", "content": question}]
    chat = {"model": "default", "messages": messages, "max_tokens": 60}
    greedy, sampled = {"temperature": 0}, {"temperature": 0.8, "seed": 3}
    text = {"model": "default", "prompt": question, "max_tokens": 60}
    options = {"num_predict": 60, "temperature": 0}
    guided = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    triton = {"text_input": question, "max_tokens": 60, "temperature": 0.0}
    return {
        "OpenAI chat": ("/v1/chat/completions", {}, chat | greedy),
        "OpenAI chat, sampled, with log probabilities": (
            "/v1/chat/completions",
            {},
            chat | sampled | {"n": 2, "logprobs": True, "top_logprobs": 2},
        ),
        "OpenAI chat, JSON": ("/v1/chat/completions", {}, chat | greedy | guided),
        "OpenAI completion": ("/v1/completions", {}, text | greedy | {"logprobs": 1, "stop": ["."]}),
        "OpenAI responses": (
            "/v1/responses",
            {},
            {"model": "default", "input": messages, "max_output_tokens": 60, "store": False} | greedy,
        ),
        "vLLM": ("/generate", {}, {"prompt": question, "max_tokens": 60} | greedy),
        "Anthropic": ("/v1/messages", {}, chat | greedy),
        "Ollama chat": (
            "/api/chat",
            {},
            {"model": "default", "messages": messages, "stream": False, "options": options},
        ),
        "Ollama": ("/api/generate", {}, {"model": "default", "prompt": question, "stream": False, "options": options}),
        "TGI": ("/generate", {}, {"inputs": question, "parameters": {"max_new_tokens": 60, "details": True}}),
        "llama.cpp": ("/completion", {}, {"prompt": question, "n_predict": 60, "return_tokens": True} | greedy),
        "BladeLLM": ("/v1/completions", BARE, text | greedy),
        "BladeLLM chat": ("/v1/chat/completions", BARE, chat | greedy),
        "PaddleNLP": ("/v1/chat/completions", {}, NATIVE | {"messages": messages}),
        "FastDeploy": ("/v1/chat/completions", {}, chat | greedy | {"reasoning_max_tokens": 5}),
        "Triton ensemble": ("/v2/models/ensemble/generate", {}, triton),
        "Triton ensemble, with counts": ("/v2/models/ensemble/infer", {}, {"inputs": tensors(question)}),
    }


def tensors(question: str) -> list[dict[str, Any]]:
    given = {"text_input": ("BYTES", question), "max_tokens": ("INT32", 60), "temperature": ("FP32", 0.0)}
    return [{"name": name, "datatype": kind, "shape": [1, 1], "data": [value]} for name, (kind, value) in given.items()]


VOLATILE = re.compile(
    rb'"(?:id|req_id|request_id|item_id|trace_id)":"[^"]*"'
    rb'|"(?:created|created_at|completed_at|\w*_duration|\w*_time|\w*_ms|\w*_latency|\w*_ts|\w*_per_second)":"?[^,}"]*"?'
    rb'|"timings":\{[^}]*\}'
)
"""Ids and times, which differ between any two answers."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Served]]:
    with ExitStack() as stack:
        default = {"PENSTOCK_SPECULATIVE_CONFIG": ""}
        flags = ("--num-gpu-blocks-override", "400", "--served-model-name", "default")
        yield [stack.enter_context(Served(*flags, *more, environment=default)) for more in ((), ("--no-speculation",))]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("dialect", list(requests("")))
def test_default_drafts_do_not_change_answers(servers: list[Served], dialect: str) -> None:
    """The questions are sent together and one by one; the last ones are answered from recent answers."""

    def answer(server: Served, question: str) -> bytes:
        path, headers, body = requests(question)[dialect]
        found = httpx.post(server.root + path, json=body, headers=headers, timeout=60)
        assert found.status_code == 200, found.text
        return VOLATILE.sub(b"", found.content)

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        found = [
            [*pool.map(lambda question, server=server: answer(server, question), QUESTIONS)]  # type: ignore[misc]
            + [answer(server, question) for question in QUESTIONS]
            for server in servers
        ]
    assert found[0] == found[1]


def test_only_the_default_drafts(servers: list[Served]) -> None:
    path, headers, body = requests(LIST)["OpenAI chat"]
    for server in servers:
        for _ in range(2):
            httpx.post(server.root + path, json=body, headers=headers, timeout=60).raise_for_status()
    drafting, plain = servers
    name = "penstock:spec_decode_num_accepted_tokens_total"

    async def check() -> None:
        assert (await read_metrics(drafting))[name] > 20

    asyncio.run(eventually(check))
    assert name not in asyncio.run(read_metrics(plain))
    assert drafting.find("speculative decoding: suffix")
    assert plain.find(r"speculative decoding: off \(the option speculation is off\)")
