"""``--tool-call-parser generic``: tool calls of models whose chat template has no tools."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_engine import ScriptedServer, scripted_server

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
IGNORES_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}}
]
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


def run(check: Callable[[ScriptedServer], Awaitable[None]], **options: Any) -> None:
    async def with_server() -> None:
        async with scripted_server(**options) as server:
            await check(server)

    asyncio.run(with_server())


async def ask(server: ScriptedServer, messages: Any, **fields: Any) -> Any:
    fields = {"model": "default", "tools": TOOLS} | fields
    (choice,) = (await server.openai.chat.completions.create(messages=messages, **fields)).choices
    return choice


def test_tools_are_described_and_calls_are_parsed() -> None:
    async def check(server: ScriptedServer) -> None:
        server.engines.steps = [[token] for token in server.encode(f"I look.\n{CALL}")]
        choice = await ask(server, [QUESTION])
        (call,) = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
        assert server.prompt.startswith("<|im_start|>system\n") and '"description": "Weather."' in server.prompt
        stream = await server.openai.chat.completions.create(
            model="default", messages=[QUESTION], tools=TOOLS, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        arguments = [call.function.arguments or "" for delta in deltas for call in delta.tool_calls or []]
        assert "".join(arguments) == '{"city": "Paris"}'
        server.say("Sunny.")
        answer = {"role": "assistant", "content": "I look.", "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        choice = await ask(server, [QUESTION, answer, result])
        assert (choice.message.content, choice.finish_reason) == ("Sunny.", "stop")
        assert f"<|im_start|>assistant\nI look.\n{CALL}<|im_end|>" in server.prompt
        assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in server.prompt

    run(check, chat_template=PLAIN, tool_call_parser="generic")


@pytest.mark.parametrize("template", [WITHOUT_SYSTEM, IGNORES_SYSTEM])
def test_tools_are_described_to_user_if_template_has_no_system_message(template: str) -> None:
    async def check(server: ScriptedServer) -> None:
        server.say("Well.")
        await ask(server, [QUESTION])
        assert "<|im_start|>system" not in server.prompt
        assert server.prompt.index("get_weather") < server.prompt.index("Paris")

    run(check, chat_template=template, tool_call_parser="generic")


def test_tools_of_template_are_not_used() -> None:
    async def check(server: ScriptedServer) -> None:
        server.say("Well.")
        await ask(server, [QUESTION])
        assert server.prompt.count("get_weather") == 1
        await ask(server, [QUESTION], tools=openai.NOT_GIVEN)
        assert "tool_call" not in server.prompt

    run(check, chat_template=f"{{% if tools %}}{{{{ tools }}}}{{% endif %}}{PLAIN}", tool_call_parser="generic")


def test_errors_of_the_template_are_reported() -> None:
    async def check(server: ScriptedServer) -> None:
        with pytest.raises(openai.BadRequestError, match="no chats today"):
            await ask(server, [QUESTION])

    run(check, chat_template="{{ raise_exception('no chats today') }}", tool_call_parser="generic")


def test_tools_are_refused_without_the_option() -> None:
    async def check(server: ScriptedServer) -> None:
        with pytest.raises(openai.BadRequestError, match="does not support tools"):
            await ask(server, [QUESTION])

    run(check, chat_template=PLAIN)
