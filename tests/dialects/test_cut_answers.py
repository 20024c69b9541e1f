"""An answer that is cut off says so in every dialect, and a tool call that is cut off is not returned as complete.

Answers are cut off by the limit of tokens, by the end of the context (for the engine the same reason) and by stop
strings; within text, within the head of a tool call and within its arguments.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripted_engine import ScriptedServer, scripted_server

from penstock.core import FinishReason

QUESTION = [{"role": "user", "content": "Go on."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ARGUMENTS = '{"city": "Paris", "days": 3}'
STOP = "Par"


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


class Answer(NamedTuple):
    """An answer in terms that all dialects share."""

    content: str
    calls: list[tuple[str, str, bool]]
    """Name, arguments and True if the call is marked as incomplete, for each call."""
    is_cut: bool
    """True if the answer has the field with which its dialect reports that it is incomplete."""


async def events(server: ScriptedServer, path: str, body: Any, headers: dict[str, str]) -> list[Any]:
    answer = await server.http.post(path, json=body | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data:").strip() for line in answer.text.splitlines()]
    return [json.loads(line) for line in data if line.startswith("{")]


async def document(server: ScriptedServer, path: str, body: Any, headers: dict[str, str]) -> Any:
    answer = await server.http.post(path, json=body | {"stream": False}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def openai_answer(choice: Any) -> Answer:
    message = choice["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"], call.get("status") == "incomplete")
        for call in message.get("tool_calls") or ()
    ]
    return Answer(message["content"] or "", calls, choice["finish_reason"] == "length")


async def chat(
    server: ScriptedServer, stop: str, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[Answer, Answer]:
    body = {"messages": QUESTION, "tools": [TOOL], **fields} | ({"stop": [stop]} if stop else {})
    whole = await document(server, "/v1/chat/completions", body, headers or {})
    content, calls, reasons = "", [], []
    for chunk in await events(server, "/v1/chat/completions", body, headers or {}):
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                if part.get("id"):
                    calls.append((part["function"]["name"], "", False))
                name, arguments, is_cut = calls[part["index"]]
                is_cut = is_cut or part.get("status") == "incomplete"
                calls[part["index"]] = (name, arguments + part["function"]["arguments"], is_cut)
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    (reason,) = reasons
    return openai_answer(whole["choices"][0]), Answer(content, calls, reason == "length")


async def fastdeploy(server: ScriptedServer, stop: str) -> tuple[Answer, Answer]:
    return await chat(server, stop, metadata={})


async def bladellm(server: ScriptedServer, stop: str) -> tuple[Answer, Answer]:
    return await chat(server, stop, {"Authorization": "TOKEN"}, max_tokens=9999)


async def messages(server: ScriptedServer, stop: str) -> tuple[Answer, Answer]:
    body: Any = {"model": "default", "max_tokens": 9999, "messages": QUESTION, "stop_sequences": [stop] if stop else []}
    body["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    cut = ("max_tokens", "model_context_window_exceeded", "stop_sequence")
    whole = await document(server, "/v1/messages", body, {})
    calls = [
        (block["name"], json.dumps(block["input"]), bool(block.get("incomplete")))
        for block in whole["content"]
        if block["type"] == "tool_use"
    ]
    text = "".join(block.get("text", "") for block in whole["content"])
    assert not (calls and calls[-1][2] and calls[-1][1] != "{}")
    whole_answer = Answer(text, calls, whole["stop_reason"] in cut)
    blocks: list[Any] = []
    content = ""
    for event in await events(server, "/v1/messages", body, {}):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": "", "incomplete": False})
        elif event["type"] == "content_block_delta":
            blocks[-1]["json"] += event["delta"].get("partial_json", "")
            content += event["delta"].get("text", "")
        elif event["type"] == "content_block_stop":
            blocks[-1]["incomplete"] = event.get("incomplete", False)
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    streamed = [
        (block["name"], "{}" if block["incomplete"] else block["json"], block["incomplete"])
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return whole_answer, Answer(content, streamed, reason in cut)


def response_answer(response: Any) -> Answer:
    calls = [
        (item["name"], item["arguments"], item["status"] == "incomplete")
        for item in response["output"]
        if item["type"] == "function_call"
    ]
    content = "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "message")
    is_cut = response["status"] == "incomplete"
    assert bool(response["incomplete_details"]) is is_cut
    return Answer(content, calls, is_cut)


async def responses(server: ScriptedServer, stop: str) -> tuple[Answer, Answer]:
    body: Any = {"input": QUESTION, "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    body |= {"stop": [stop]} if stop else {}
    whole = await document(server, "/v1/responses", body, {})
    *_, last = await events(server, "/v1/responses", body, {})
    assert last["type"] == f"response.{last['response']['status']}"
    return response_answer(whole), response_answer(last["response"])


async def ollama(server: ScriptedServer, stop: str) -> tuple[Answer, Answer]:
    """Ollama has no incomplete calls: they are omitted."""
    body: Any = {"model": "default", "messages": QUESTION, "tools": [TOOL], "options": {"stop": [stop]} if stop else {}}

    def answer(lines: list[Any]) -> Answer:
        calls = [
            (call["function"]["name"], json.dumps(call["function"]["arguments"]), False)
            for line in lines
            for call in line["message"].get("tool_calls", ())
        ]
        content = "".join(line["message"]["content"] for line in lines)
        return Answer(content, calls, lines[-1]["done_reason"] == "length")

    return answer([await document(server, "/api/chat", body, {})]), answer(await events(server, "/api/chat", body, {}))


Dialect = Callable[[ScriptedServer, str], Awaitable[tuple[Answer, Answer]]]
DIALECTS: tuple[Dialect, ...] = (chat, fastdeploy, bladellm, messages, responses, ollama)
"""Dialects with tools: OpenAI's chat API (also llama-server, Text Generation Inference and vLLM), and all others."""
HERMES = '<tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>'
QWEN3_CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
HARMONY = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>ARGUMENTS<|call|>"
HARMONY_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{{ tools }}{# <|channel|>analysis<|message|> <|call|> #}<|start|>assistant"
)
OTHER_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}{# MARKERS #}"
FORMATS: dict[str, tuple[str, str, str]] = {
    "hermes": ("", HERMES.replace("ARGUMENTS", ARGUMENTS), "<tool_call>\n{"),
    "qwen3_coder": (OTHER_TEMPLATE.replace("MARKERS", "<tool_call><function="), QWEN3_CODER, "<tool_call>\n<function="),
    "harmony": (HARMONY_TEMPLATE, HARMONY.replace("ARGUMENTS", ARGUMENTS), "to=functions."),
}
"""Chat template, a call, and text that only the head of a call has, by tool call format."""


async def check(form: str, text: str, stop: str, finished: FinishReason) -> list[tuple[str, Answer]]:
    """The answer of each dialect, which is the same whole and streamed."""
    async with scripted_server(chat_template=FORMATS[form][0]) as server:
        result = []
        for dialect in DIALECTS:
            server.say(*(text[at : at + 7] for at in range(0, len(text), 7)), finished=finished)
            whole, streamed = await dialect(server, stop)
            assert streamed == whole, dialect.__name__
            result.append((dialect.__name__, whole))
        return result


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stop", ["", STOP])
def test_call_cut_off_in_its_arguments_is_marked(form: str, stop: str) -> None:
    call = FORMATS[form][1]
    text = call if stop else call[: call.index(STOP) + 2]
    for dialect, answer in asyncio.run(check(form, text, stop, FinishReason.STOP if stop else FinishReason.LENGTH)):
        assert answer.is_cut and not answer.content, dialect
        if dialect == "ollama":
            assert not answer.calls
            continue
        ((name, arguments, is_incomplete),) = answer.calls
        assert name == "weather" and is_incomplete, dialect
        assert dialect == "messages" or (arguments.startswith("{") and not arguments.endswith("}"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("by_stop", [False, True])
def test_call_cut_off_in_its_head_is_not_text(form: str, by_stop: bool) -> None:
    call, head = FORMATS[form][1:]
    text, stop = (call, "weath") if by_stop else (call[: call.index(head) + len(head)], "")
    for dialect, answer in asyncio.run(check(form, text, stop, FinishReason.STOP if by_stop else FinishReason.LENGTH)):
        is_named = dialect == "messages" and by_stop  # names the stop string
        assert answer == Answer("", [], True) or is_named, dialect


@pytest.mark.parametrize("form", FORMATS)
def test_complete_call_before_cut_is_complete(form: str) -> None:
    call = FORMATS[form][1]
    both = f"{call}{'<|start|>assistant' if form == 'harmony' else ''}{call}"
    text = both[: both.rindex("Par") + 2]
    for dialect, answer in asyncio.run(check(form, text, "", FinishReason.LENGTH)):
        assert answer.is_cut, dialect
        first, *rest = answer.calls
        assert json.loads(first[1])["city"] == "Paris" and not first[2], dialect
        assert [incomplete for *_, incomplete in rest] == ([] if dialect == "ollama" else [True]), dialect


@pytest.mark.parametrize("form", FORMATS)
def test_complete_call_at_the_limit_is_not_marked(form: str) -> None:
    for dialect, answer in asyncio.run(check(form, FORMATS[form][1], "", FinishReason.STOP)):
        ((_, arguments, is_incomplete),) = answer.calls
        assert json.loads(arguments)["city"] == "Paris" and not is_incomplete and not answer.is_cut, dialect


@pytest.mark.parametrize("form", FORMATS)
def test_text_cut_off_by_limit_is_marked(form: str) -> None:
    text = "<|channel|>final<|message|>Let me" if form == "harmony" else "Let me"
    for dialect, answer in asyncio.run(check(form, text, "", FinishReason.LENGTH)):
        assert answer == Answer("Let me", [], True), dialect


PLAIN: dict[str, tuple[str, Any, Callable[[Any], bool]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}, lambda one: one["choices"][0]["finish_reason"] == "length"),
    "llama-server": (
        "/completion",
        {"prompt": "x"},
        lambda one: one["stop_type"] == "limit",
    ),
    "ollama generate": (
        "/api/generate",
        {"model": "default", "prompt": "x", "raw": True},
        lambda one: one["done_reason"] == "length",
    ),
    "Text Generation Inference": (
        "/generate",
        {"inputs": "x", "parameters": {"details": True}},
        lambda one: one["details"]["finish_reason"] == "length",
    ),
    "vLLM": ("/generate", {"prompt": "x"}, lambda one: one.get("finish_reason") == ["length"]),
    "PaddleNLP": (
        "/v1/chat/completions",
        {"messages": QUESTION, "max_dec_len": 99},
        lambda one: one.get("finish_reason") == "length",
    ),
    "FastDeploy": (
        "/v1/completions",
        {"prompt": "x", "metadata": {}},
        lambda one: one["choices"][0]["finish_reason"] == "length",
    ),
}
"""Endpoints without tools: path, body, and function that reads whether the answer was cut off."""


@pytest.mark.parametrize("name", PLAIN)
def test_completion_cut_off_by_limit_is_marked(name: str) -> None:
    path, body, is_cut = PLAIN[name]

    async def check_reasons() -> None:
        async with scripted_server() as server:
            for finished in (FinishReason.LENGTH, FinishReason.STOP):
                server.say("Let me", finished=finished)
                assert is_cut(await document(server, path, body, {})) is (finished is FinishReason.LENGTH)
                if name in ("vLLM", "PaddleNLP"):
                    lines = await events(server, path, body, {})
                    assert [is_cut(line) for line in lines].count(True) == (finished is FinishReason.LENGTH)

    asyncio.run(check_reasons())


TRUNCATED: dict[str, tuple[str, Any]] = {
    "completions": ("/v1/completions", {"prompt": "one two three four", "truncate_prompt_tokens": 3}),
    "chat": ("/v1/chat/completions", {"messages": QUESTION, "truncate_prompt_tokens": 3}),
    "vLLM": ("/generate", {"prompt": "one two three four", "truncate_prompt_tokens": 3}),
    "Text Generation Inference": ("/generate", {"inputs": "one two three four", "parameters": {"truncate": 3}}),
}
"""Requests that truncate their prompt."""


@pytest.mark.parametrize("name", TRUNCATED)
def test_header_has_number_of_truncated_prompt_tokens(name: str) -> None:
    path, body = TRUNCATED[name]

    async def check_header() -> None:
        async with scripted_server() as server:
            server.say("Let me")
            for stream in (False, True):
                answer = await server.http.post(path, json=body | {"stream": stream})
                assert answer.status_code == 200, answer.text
                assert int(answer.headers["x-penstock-truncated"]) > 0
                assert len(server.engines.requests[-1].prompt) == 3
            del body["parameters" if name.startswith("Text") else "truncate_prompt_tokens"]
            answer = await server.http.post(path, json=body)
            assert "x-penstock-truncated" not in answer.headers

    asyncio.run(check_header())


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PIXEL}"
CHAT_IMAGE: Any = [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": URL}}]
IMAGES: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": CHAT_IMAGE}]}),
    "FastDeploy": ("/v1/chat/completions", {"messages": [{"role": "user", "content": CHAT_IMAGE}], "metadata": {}}),
    "PaddleNLP": ("/v1/chat/completions", {"messages": [{"role": "user", "content": CHAT_IMAGE}], "max_dec_len": 9}),
    "tool result": (
        "/v1/chat/completions",
        {"messages": [*QUESTION, {"role": "tool", "tool_call_id": "1", "content": CHAT_IMAGE}]},
    ),
    "Anthropic": (
        "/v1/messages",
        {
            "model": "default",
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
                    ],
                }
            ],
        },
    ),
    "Responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    ),
    "Ollama chat": (
        "/api/chat",
        {"model": "default", "messages": [{"role": "user", "content": "Look.", "images": [PIXEL]}]},
    ),
    "Ollama generate": ("/api/generate", {"model": "default", "prompt": "Look.", "images": [PIXEL]}),
    "Ollama raw": ("/api/generate", {"model": "default", "prompt": "Look.", "images": [PIXEL], "raw": True}),
    "llama-server": (
        "/completion",
        {"prompt": {"prompt_string": "Look: <__media__>", "multimodal_data": [PIXEL]}},
    ),
    "llama-server, older": ("/completion", {"prompt": "[img-1]", "image_data": [{"data": PIXEL, "id": 1}]}),
    "tokens": ("/tokenize", {"messages": [{"role": "user", "content": CHAT_IMAGE}]}),
}
"""Requests with an image: path and body."""


@pytest.mark.parametrize("name", IMAGES)
def test_image_for_text_model_is_error(name: str) -> None:
    path, body = IMAGES[name]

    async def check_error() -> None:
        async with scripted_server() as server:
            server.say("Let me")
            for stream in (False, True):
                given = body if path == "/tokenize" else body | {"stream": stream}
                answer = await server.http.post(path, json=given)
                assert answer.status_code in (400, 501) or "error_code" in answer.text, answer.text
                assert not server.engines.requests

    asyncio.run(check_error())
