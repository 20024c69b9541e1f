"""Constrained tool calls: whatever the model tries to write, a call is well-formed or an error, and never content."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from broken_calls import NAMES, NUMBER, SCHEMAS, TEXT, broken_answer, encode_in_pieces, schema, tool
from copying_model import copying_model, prompt_to_copy
from scripted_model import scripted_model
from serving import Served

from penstock.text import ToolCallFormat
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_calls.formats import HARMONY, TOOL_CALL_FORMATS
from penstock.text.tool_calls.json_formats import HERMES

GENERATIONS = int(os.environ.get("PENSTOCK_BROKEN_CALLS", "840"))
"""Number of generations of the random test over all formats, half of them streamed."""
FORMS = [form for form in TOOL_CALL_FORMATS if form.constrainable]
CHAT = "/v1/chat/completions"
HEADER = "x-penstock-tool-strictness"


def template(form: ToolCallFormat) -> str:
    """A chat template in which the format is recognized."""
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    messages = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return "{#" + " ".join(form.template_markers) + "#}" + tools + messages


class Copier:
    """A server whose model writes a given text as far as its constraint allows."""

    url = ""
    """URL of the server."""

    def __init__(
        self, folder: Path, form: ToolCallFormat, markers_are_tokens: bool, chat_template: str | None = None
    ) -> None:
        copying_model(folder, chat_template or template(form), form.marker_tokens if markers_are_tokens else ())
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
        if HEADER in response.headers:
            return {"error": {"message": f"{HEADER}: {response.headers[HEADER]}"}}, "error"
        choice = document["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = ""
    async with client.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            return json.loads(await response.aread()), "error"
        if HEADER in response.headers:
            return {"error": {"message": f"{HEADER}: {response.headers[HEADER]}"}}, "error"
        for line in (await response.aread()).decode().split("\n"):
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
    """Description of a malformed or missing call; empty if the answer is well-formed."""
    if finish == "error":
        error = message["error"]["message"]
        return "" if "unknown tool" in error or "malformed tool call" in error else f"error {error}"
    calls = message.get("tool_calls") or []
    for call in calls[:-1] if finish == "length" else calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            jsonschema.validate(json.loads(arguments), tools[name])
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            return f"call {name} {arguments}: {error!r:.200}"
    content = message.get("content") or ""
    in_json = form.allow_unmarked and content.lstrip().startswith(("{", "["))  # a marker in a string is text
    if form is not HARMONY and not in_json and any(marker in content for marker in form.start_markers):
        return f"call as content {content!r}"
    unmarked = form.unmarked_calls(list(tools))
    begin = content.lstrip()
    if unmarked and not calls and begin.startswith(unmarked.start) and not re.match(unmarked.escape, begin, re.DOTALL):
        return f"call as content {content!r}"
    return "" if (finish == "tool_calls") == bool(calls) or finish == "length" else f"finish_reason {finish}"


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "markers_are_tokens",
    [pytest.param(True, id="tokens"), pytest.param(False, id="text", marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize(
    "form", [form for form in TOOL_CALL_FORMATS if form.constrainable], ids=lambda form: str(form.parsers[0])
)
def test_broken_calls_are_never_returned(form: ToolCallFormat, markers_are_tokens: bool, tmp_path: Path) -> None:
    copier = Copier(tmp_path, form, markers_are_tokens)
    rng = random.Random(f"{form.parsers[0]} {form.call_start} {markers_are_tokens}")
    count = max(GENERATIONS // (4 * len(FORMS)), 1)

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
        log = "\n".join(line for line in served.lines if "POST" not in line)[-4000:] if problems else ""
    print(form.parsers[0], dict(counts))
    assert not problems, f"{len(problems)} of {count}:\n" + "\n".join([*problems[:5], log])


CITY = schema({"city": TEXT, "days": NUMBER}, ["city"])
UNIQUE = schema({"city": {"type": "array", "items": TEXT, "uniqueItems": True}}, ["city"])
"""A schema that the grammar engine cannot express."""
BAD = '<tool_call>\n{"name": "get_weather", "arguments": {"days": "x", "town": 5}}\n</tool_call>'
"""A call with a wrong type, an unknown argument and a missing one."""
GOOD = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 3, "city": "Paris"}}\n</tool_call>'
THINKING = "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call></think><think>"


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copier]:
    copier = Copier(tmp_path_factory.mktemp("model"), HERMES, True)
    with Served(*copier.arguments) as served:
        copier.url = served.root
        yield copier


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model tries to write ``BAD``."""
    with Served("--model", str(scripted_model(tmp_path_factory.mktemp("scripted"), BAD))) as served:
        yield served


def post(copier: Copier, text: str, tools: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    """Response to a chat request after which the model tries to write ``text``."""
    return httpx.post(copier.url + CHAT, json=copier.body(copier.encode(text), tools, **fields))


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def arguments(response: httpx.Response) -> Any:
    """Arguments of the only call of an answer."""
    (call,) = message_of(response)["tool_calls"]
    return json.loads(call["function"]["arguments"])


def test_default_level_enforces_schema(copier: Copier) -> None:
    response = post(copier, BAD, [tool("get_weather", CITY)])
    jsonschema.validate(arguments(response), CITY)
    assert HEADER not in response.headers


def test_tool_with_strict_false_has_any_arguments(copier: Copier) -> None:
    response = post(copier, BAD, [tool("get_weather", CITY, strict=False)])
    assert arguments(response) == {"days": "x", "town": 5}
    assert HEADER not in response.headers


def test_tool_with_strict_requires_all_properties(copier: Copier) -> None:
    assert arguments(post(copier, BAD, [tool("get_weather", CITY, strict=True)])).keys() == {"city", "days"}


@pytest.mark.parametrize("stream", [False, True])
def test_schema_that_cannot_be_expressed_is_named_in_header(copier: Copier, stream: bool) -> None:
    tools = [tool("get_weather", UNIQUE), tool("other", CITY), tool("third", {"type": "array"})]
    response = post(copier, BAD, tools, stream=stream)
    assert response.status_code == 200
    assert set(response.headers[HEADER].split(", ")) == {"get_weather=function", "third=function"}
    if not stream:
        assert arguments(response) == {"days": "x", "town": 5}


def test_strict_tool_with_inexpressible_schema_is_refused_by_keyword(copier: Copier) -> None:
    response = post(copier, BAD, [tool("get_weather", UNIQUE, strict=True)])
    assert response.status_code == 400
    assert "uniqueItems" in response.text and "get_weather" in response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", 3),
        ("ignore_eos", True),
        ("bad_words", ["zebra"]),
        ("allowed_token_ids", list(range(3500))),
        ("guided_grammar", 'start: "x"'),
    ],
)
def test_field_that_excludes_grammar_is_named_in_header(copier: Copier, field: str, value: Any) -> None:
    response = post(copier, "x", [tool("get_weather", CITY)], **{field: value})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == f"*=off;{field}"


def test_response_format_allows_answer_or_call(copier: Copier) -> None:
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema({"a": NUMBER}, ["a"])}}
    tools = [tool("get_weather", CITY)]
    message = message_of(post(copier, '{"a": 1}', tools, response_format=answer))
    assert (message["content"], message.get("tool_calls")) == ('{"a": 1}', None)
    response = post(copier, BAD, tools, response_format=answer)
    jsonschema.validate(arguments(response), CITY)
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_at_most_one_call_without_parallel_calls(copier: Copier) -> None:
    tools = [tool("get_weather", CITY)]
    several = post(copier, f"{GOOD}\n{GOOD}", tools)
    assert [one["function"]["name"] for one in message_of(several)["tool_calls"]] == ["get_weather", "get_weather"]
    single = post(copier, f"{GOOD}\n{GOOD}", tools, parallel_tool_calls=False)
    assert arguments(single) == {"days": 3, "city": "Paris"}
    assert single.json()["usage"]["completion_tokens"] < several.json()["usage"]["completion_tokens"]


def test_arguments_may_have_any_order(copier: Copier) -> None:
    (call,) = message_of(post(copier, GOOD, [tool("get_weather", CITY)]))["tool_calls"]
    assert call["function"]["arguments"] == '{"days": 3, "city": "Paris"}'


def test_large_tool_set_is_accepted(copier: Copier) -> None:
    properties = {f"p{i}": {"type": "string", "description": "d" * 900} for i in range(10)}
    tools = [tool(f"tool_{i}", schema({**properties, f"own{i}": NUMBER})) for i in range(100)]
    assert len(json.dumps(tools)) > 900_000
    call = '<tool_call>\n{"name": "tool_77", "arguments": {"p3": "x", "own78": 5, "own77": 5}}\n</tool_call>'
    assert "own78" not in arguments(post(copier, call, tools, parallel_tool_calls=False))


def test_strictness_off_passes_calls_on(tmp_path: Path) -> None:
    copier = Copier(tmp_path, HERMES, False)
    with Served(*copier.arguments, "--tool-strictness", "off") as served:
        copier.url = served.root
        assert arguments(post(copier, BAD, [tool("get_weather", CITY)])) == {"days": "x", "town": 5}


@pytest.mark.slow
def test_calls_are_not_constrained_without_guided_decoding(tmp_path: Path) -> None:
    copier = Copier(tmp_path, HERMES, False)
    with Served(*copier.arguments, "--guided-decoding-backend", "off") as served:
        copier.url = served.root
        response = post(copier, BAD, [tool("get_weather", CITY)])
        assert arguments(response) == {"days": "x", "town": 5}
        assert response.headers[HEADER] == "*=off"
        assert post(copier, BAD, [tool("get_weather", CITY, strict=True)]).status_code == 400


def test_marker_in_reasoning_begins_no_call(tmp_path: Path) -> None:
    copier = Copier(tmp_path, HERMES, True, THINKING)
    with Served(*copier.arguments, "--tool-strictness", "function") as served:
        copier.url = served.root
        text = f"<think>I could write <tool_call>, {{}}.</think>\n\nNow: {BAD}"
        message = message_of(post(copier, text, [tool("get_weather", CITY)]))
    assert message["reasoning_content"] == "I could write <tool_call>, {}."
    assert message["content"] == "Now:"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"days": "x", "town": 5}


USER = {"role": "user", "content": "x"}
PARIS = schema({"city": {"enum": ["Paris"]}}, ["city"])
DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
    "anthropic": (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 300, "tools": [{"name": "get_weather", "input_schema": PARIS}]},
        lambda answer: [part["input"] for part in answer["content"] if part["type"] == "tool_use"],
    ),
    "responses": (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", "name": "get_weather", "parameters": PARIS}]},
        lambda answer: [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"],
    ),
    "ollama": (
        "/api/chat",
        {"messages": [USER], "stream": False, "tools": [tool("get_weather", PARIS)]},
        lambda answer: [call["function"]["arguments"] for call in answer["message"]["tool_calls"]],
    ),
}
"""Path, body, and function that gets the arguments of all calls, by dialect."""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_of_every_dialect_follow_schema(dialect: str, scripted: Served) -> None:
    path, body, arguments_of = DIALECTS[dialect]
    response = httpx.post(scripted.root + path, json={"model": "default", **body})
    assert response.status_code == 200, response.text
    found = arguments_of(response.json())
    assert found and all(each == {"city": "Paris"} for each in found)


def summary(message: dict[str, Any], finish: str) -> Any:
    """The parts of an answer that do not depend on streaming."""
    if finish == "error":
        return message["error"]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["content"] or "", calls, finish
