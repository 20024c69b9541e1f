"""Images in the results of tools, in every dialect and under chat templates that show them there or do not."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import image_checkpoints as checkpoints
import openai
import pytest
from image_checkpoints import PLACEHOLDER, plain
from scripted_engine import ScriptedServer, scripted_server

NATIVE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{{ tools }}"
    "{# <tool_call> #}[assistant]"
)
TEXT_ONLY = NATIVE.replace(
    "{% if message.content is string %}", "{% if message.content is string or message.role == 'tool' %}"
)
RAISES = NATIVE.replace(
    "[{{ message.role }}]",
    "[{{ message.role }}]{% if message.role == 'tool' and message.content is not string %}"
    "{{ raise_exception('tool results are texts') }}{% endif %}",
)
TEMPLATES = {"native": NATIVE, "text only": TEXT_ONLY, "raises": RAISES}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "Look."}
Texts = tuple[str, str]


def png() -> str:
    file = io.BytesIO()
    plain("green").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


URL = f"data:image/png;base64,{png()}"


async def chat(server: ScriptedServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    content = [{"type": "text", "text": "a screen"}, {"type": "image_url", "image_url": {"url": URL}}]
    said: list[Any] = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
    said += [{"role": "tool", "tool_call_id": "c1", "content": content}, {"role": "user", "content": "So?"}]
    await server.openai.chat.completions.create(model="default", messages=said, tools=[FUNCTION])  # type: ignore[list-item]


async def messages(server: ScriptedServer) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png()}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a screen"}, image]}
    said: Any = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
    ]
    said += [{"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    await server.anthropic.messages.create(model="default", max_tokens=9, messages=said, tools=tools)


async def responses(server: ScriptedServer) -> None:
    output = [{"type": "input_text", "text": "a screen"}, {"type": "input_image", "image_url": URL}]
    said: Any = [QUESTION, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}]
    said += [{"type": "function_call_output", "call_id": "c1", "output": output}, {"role": "user", "content": "So?"}]
    tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    await server.openai.responses.create(model="default", input=said, tools=tools, store=False)


async def ollama(server: ScriptedServer) -> None:
    said: Any = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
    ]
    said += [{"role": "tool", "tool_name": "look", "content": "a screen", "images": [png()]}]
    said += [{"role": "user", "content": "So?"}]
    body = {"model": "default", "messages": said, "tools": [FUNCTION], "stream": False}
    answer = await server.http.post("/api/chat", json=body)
    if answer.status_code != 200:
        raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)


DIALECTS: list[Callable[[ScriptedServer], Awaitable[None]]] = [chat, messages, responses, ollama]


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("colours")
    checkpoints.save_colours(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


@pytest.mark.parametrize("template", TEMPLATES)
def test_images_of_tools_are_seen(colours: str, template: str) -> None:
    async def check() -> None:
        async with scripted_server(colours, chat_template=TEMPLATES[template]) as server:
            server.say("Yes.")
            for dialect in DIALECTS:
                await dialect(server)
                request = server.engines.requests[-1]
                assert len(request.images) == 1 and request.prompt.count(PLACEHOLDER) == 9, dialect.__name__
                shown = (
                    "[tool]a screen<|vision_start|>" if template == "native" else "[tool]a screen[user]<|vision_start|>"
                )
                text = server.prompt.replace("\n", "")
                if dialect is ollama:  # whose images come before the text
                    shown = shown.replace("a screen<|vision_start|>", "<|vision_start|>")
                assert shown in text and "So?" in text, (dialect.__name__, text)

    asyncio.run(check())


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_images_in_any_role_of_a_chat(colours: str, role: str) -> None:
    async def check() -> None:
        async with scripted_server(colours, chat_template=NATIVE) as server:
            server.say("Yes.")
            parts: Any = [{"type": "image_url", "image_url": {"url": URL}}]
            said: Any = [
                {"role": role, "content": parts} | ({"tool_call_id": "c1"} if role == "tool" else {}),
                QUESTION,
            ]
            await server.openai.chat.completions.create(model="default", messages=said)
            assert len(server.engines.requests[-1].images) == 1

    asyncio.run(check())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_model_without_vision_refuses_them(dialect: Callable[[ScriptedServer], Awaitable[None]]) -> None:
    async def check() -> None:
        async with scripted_server() as server:
            errors = (openai.BadRequestError, anthropic.BadRequestError, httpx.HTTPStatusError)
            with pytest.raises(errors, match=r"(image|image_url|input_image) is not supported, only text is"):
                await dialect(server)

    asyncio.run(check())


def test_a_refusal_is_text() -> None:
    """The part by which OpenAI's API has an answer that refuses."""

    async def check() -> None:
        async with scripted_server() as server:
            server.say("Yes.")
            refusal: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
            await server.openai.chat.completions.create(model="default", messages=[QUESTION, refusal, QUESTION])  # type: ignore[list-item]
            assert "I will not." in server.prompt

    asyncio.run(check())
