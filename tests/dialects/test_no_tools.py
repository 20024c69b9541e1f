"""``tool_choice: none`` in each dialect: the prompt contains no tools, and the answer no call, not even as text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedServer, scripted_server

QUESTION: Any = [{"role": "user", "content": "Go on."}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTION: Any = {"type": "function", "function": {"name": "look_around", "parameters": SCHEMA}}


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


async def chat(server: ScriptedServer, stream: bool) -> tuple[str, str]:
    fields: Any = {"model": "default", "messages": QUESTION, "tools": [FUNCTION], "tool_choice": "none"}
    if not stream:
        (choice,) = (await server.openai.chat.completions.create(**fields)).choices
        assert not choice.message.tool_calls
        return choice.message.content or "", choice.finish_reason
    text, reason = "", ""
    async for chunk in await server.openai.chat.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.tool_calls
        text, reason = text + (choice.delta.content or ""), choice.finish_reason or ""
    return text, reason


async def messages(server: ScriptedServer, stream: bool) -> tuple[str, str]:
    tools: Any = [{"name": "look_around", "input_schema": SCHEMA}]
    fields: Any = {"model": "default", "max_tokens": 99, "messages": QUESTION, "tools": tools}
    fields["tool_choice"] = {"type": "none"}
    if not stream:
        message = await server.anthropic.messages.create(**fields)
    else:
        async with server.anthropic.messages.stream(**fields) as streamed:
            message = await streamed.get_final_message()
    assert message.stop_reason == "end_turn"
    return "".join(block.text for block in message.content), "stop"


async def responses(server: ScriptedServer, stream: bool) -> tuple[str, str]:
    tools: Any = [{"type": "function", "name": "look_around", "parameters": SCHEMA, "strict": False}]
    fields: Any = {"model": "default", "input": QUESTION, "tools": tools, "tool_choice": "none", "store": False}
    if not stream:
        return (await server.openai.responses.create(**fields)).output_text, "stop"
    async for event in await server.openai.responses.create(**fields, stream=True):
        last = event
    return last.response.output_text, "stop"


async def bladellm(server: ScriptedServer, stream: bool) -> tuple[str, str]:
    body = {"messages": QUESTION, "tools": [FUNCTION], "tool_choice": "none"}
    answer = await server.http.post("/v1/chat/completions", json=body, headers={"Authorization": "TOKEN"})
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"] or "", choice["finish_reason"]


DIALECTS: list[Callable[[ScriptedServer, bool], Awaitable[tuple[str, str]]]] = [chat, messages, responses, bladellm]
CALL = '{"name": "look_around", "arguments": {}}'
HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{{ tools }}{# <|channel|>analysis<|message|> <|call|> #}<|start|>assistant"
)
PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{{ tools }}"
ANSWERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a call alone": ({}, f"<tool_call>\n{CALL}\n</tool_call>", ""),
    "a call after text": ({}, f"Well. <tool_call>\n{CALL}\n</tool_call>", "Well."),
    "harmony": (
        {"chat_template": HARMONY},
        "<|channel|>final<|message|>Well.<|end|><|start|>assistant<|channel|>commentary to=functions.look_around "
        "<|constrain|>json<|message|>{}<|call|>",
        "Well.",
    ),
    "pythonic": (
        {"chat_template": PLAIN, "tool_call_parser": "pythonic"},
        "Well. <|python_start|>[look_around()]<|python_end|>",
        "Well.",
    ),
    "JSON that is no call": ({"chat_template": PLAIN, "tool_call_parser": "llama3_json"}, CALL, CALL),
    "a list that is no call": ({"chat_template": PLAIN, "tool_call_parser": "pythonic"}, "[f(x=1)]", "[f(x=1)]"),
    "no format": ({"chat_template": PLAIN}, "Well.", "Well."),
}
"""By case: options of the model, its raw output, and the expected content of the message."""


@pytest.mark.parametrize("name", ANSWERS)
def test_tool_choice_none_hides_tools_and_removes_calls(name: str) -> None:
    options, answer, content = ANSWERS[name]

    async def check() -> None:
        async with scripted_server(**options) as server:
            tokens = server.encode(answer)
            server.engines.steps = [[token] for token in tokens]
            for dialect in DIALECTS:
                for stream in (False, True):
                    assert await dialect(server, stream) == (content, "stop")
                    assert "look_around" not in server.prompt

    asyncio.run(check())


def test_prompt_has_tools_with_tool_choice_auto() -> None:
    async def check() -> None:
        async with scripted_server() as server:
            server.say("Well.")
            for choice in ("auto", None):
                await server.openai.chat.completions.create(
                    model="default", messages=QUESTION, tools=[FUNCTION], extra_body={"tool_choice": choice}
                )
                assert "look_around" in server.prompt

    asyncio.run(check())
