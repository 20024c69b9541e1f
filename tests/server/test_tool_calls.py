"""Constrained tool calls: whatever the model tries to write, a call is well-formed or an error, and never content."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from broken_calls import NAMES, SCHEMAS, broken_answer, encode_in_pieces, tool
from copying_model import copying_model, prompt_to_copy
from serving import Served

from penstock.text import ToolCallFormat
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls.formats import HARMONY, TOOL_CALL_FORMATS

GENERATIONS = int(os.environ.get("PENSTOCK_BROKEN_CALLS", "840"))
"""Number of generations of the random test over all formats, half of them streamed."""
CHAT = "/v1/chat/completions"


def template(form: ToolCallFormat) -> str:
    """A chat template in which the format is recognized."""
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    messages = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return "{#" + " ".join(form.template_markers) + "#}" + tools + messages


class Copier:
    """A server whose model writes a given text as far as its constraint allows."""

    def __init__(self, folder: Path, form: ToolCallFormat, markers_are_tokens: bool) -> None:
        copying_model(folder, template(form), form.marker_tokens if markers_are_tokens else ())
        self.form = form
        self.tokenizer = Tokenizer(folder, None)
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        assert self.end is not None
        self.arguments = ("--model", str(folder), "--tool-call-parser", form.parsers[0], "--max-model-len", "1600")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def body(self, token_ids: list[int], tools: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Chat request after which the model tries to generate ``token_ids``."""
        assert self.end is not None
        prompt = prompt_to_copy(token_ids, self.end)
        return {
            "model": "default",
            "messages": [],
            "prompt_token_ids": prompt,
            "tools": tools,
            "temperature": 0,
            "max_tokens": 900,
            **fields,
        }


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Message and finish reason of the answer, or the error and ``error``."""
    if not body.get("stream"):
        response = await client.post(CHAT, json=body)
        document = response.json()
        if response.status_code != 200:
            return document, "error"
        choice = document["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = ""
    async with client.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            return json.loads(await response.aread()), "error"
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            document = json.loads(line.removeprefix("data: "))
            if "error" in document:
                return document, "error"
            for choice in document["choices"]:
                delta, finish = choice["delta"], choice["finish_reason"] or finish
                message["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call.get("id"):
                        message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, finish


def malformed(message: dict[str, Any], finish: str, tools: dict[str, Any], form: ToolCallFormat) -> str:
    """What is wrong with an answer; empty if it is well-formed."""
    if finish == "error":
        return "" if "unknown tool" in message["error"]["message"] else f"error {message['error']['message']}"
    calls = message.get("tool_calls") or []
    for call in calls[:-1] if finish == "length" else calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            jsonschema.validate(json.loads(arguments), tools[name])
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            return f"call {name} {arguments}: {error!r:.200}"
    content = message.get("content") or ""
    if form is not HARMONY and any(marker in content for marker in form.start_markers):
        return f"call as content {content!r}"
    unmarked = form.unmarked_calls(list(tools))
    if unmarked and any(re.match(head, content.lstrip()) for head in (*unmarked.heads.values(), unmarked.unknown)):
        return f"call as content {content!r}"
    return "" if (finish == "tool_calls") == bool(calls) or finish == "length" else f"finish_reason {finish}"


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("markers_are_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", TOOL_CALL_FORMATS, ids=lambda form: str(form.parsers[0]))
def test_broken_calls_are_never_returned(form: ToolCallFormat, markers_are_tokens: bool, tmp_path: Path) -> None:
    copier = Copier(tmp_path, form, markers_are_tokens)
    rng = random.Random(f"{form.parsers[0]} {form.call_start} {markers_are_tokens}")
    count = max(GENERATIONS // (4 * len(TOOL_CALL_FORMATS)), 1)

    async def check(client: httpx.AsyncClient) -> str:
        names = rng.sample(NAMES, k=rng.randint(1, 4))
        schemas = {name: rng.choice(SCHEMAS) for name in names}
        text = broken_answer(form, schemas, rng)
        token_ids = encode_in_pieces(copier.encode, text, rng)
        body = copier.body(token_ids[:550], [tool(name, schemas[name]) for name in names])
        if rng.random() < 0.2:
            body["parallel_tool_calls"] = False
        whole, streamed = await asyncio.gather(ask(client, body), ask(client, body | {"stream": True}))
        problems = [malformed(*answer, schemas, form) for answer in (whole, streamed)]
        if summary(*whole) != summary(*streamed):
            problems.append(f"differs: {whole} {streamed}")
        counts.update([whole[1]])
        return "; ".join([f"{text!r}: {problem}" for problem in problems if problem])

    async def run(url: str) -> list[str]:
        limit = asyncio.Semaphore(16)

        async def limited(client: httpx.AsyncClient) -> str:
            async with limit:
                return await check(client)

        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            return await asyncio.gather(*(limited(client) for _ in range(count)))

    counts: Counter[str] = Counter()
    with Served(*copier.arguments) as served:
        problems = [problem for problem in asyncio.run(run(served.root)) if problem]
    print(form.parsers[0], dict(counts))
    assert not problems, f"{len(problems)} of {count}:\n" + "\n".join(problems[:5])


def summary(message: dict[str, Any], finish: str) -> Any:
    """The parts of an answer that do not depend on streaming."""
    if finish == "error":
        return message["error"]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["content"] or "", calls, finish
