"""Images in tool results, in each dialect, with chat templates that accept or reject images in tool messages."""

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

IMAGES_IN_TOOLS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{{ tools }}"
    "{# <tool_call> #}[assistant]"
)
TEXT_ONLY = IMAGES_IN_TOOLS.replace(
    "{% if message.content is string %}", "{% if message.content is string or message.role == 'tool' %}"
)
REJECTS_PARTS = IMAGES_IN_TOOLS.replace(
    "[{{ message.role }}]",
    "[{{ message.role }}]{% if message.role == 'tool' and message.content is not string %}"
    "{{ raise_exception('tool results are texts') }}{% endif %}",
)
TEMPLATES = {"native": IMAGES_IN_TOOLS, "text only": TEXT_ONLY, "raises": REJECTS_PARTS}
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
    history: list[Any] = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "c1", "content": content}, {"role": "user", "content": "So?"}]
    await server.openai.chat.completions.create(model="default", messages=history, tools=[FUNCTION])  # type: ignore[list-item]


async def messages(server: ScriptedServer) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png()}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a screen"}, image]}
    history: Any = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
    ]
    history += [{"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    await server.anthropic.messages.create(model="default", max_tokens=9, messages=history, tools=tools)


async def responses(server: ScriptedServer) -> None:
    output = [{"type": "input_text", "text": "a screen"}, {"type": "input_image", "image_url": URL}]
    history: Any = [QUESTION, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}]
    history += [{"type": "function_call_output", "call_id": "c1", "output": output}, {"role": "user", "content": "So?"}]
    tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    await server.openai.responses.create(model="default", input=history, tools=tools, store=False)


async def ollama(server: ScriptedServer) -> None:
    history: Any = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
    ]
    history += [{"role": "tool", "tool_name": "look", "content": "a screen", "images": [png()]}]
    history += [{"role": "user", "content": "So?"}]
    body = {"model": "default", "messages": history, "tools": [FUNCTION], "stream": False}
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
def test_tool_image_reaches_model_in_each_dialect(colours: str, template: str) -> None:
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
                if dialect is ollama:  # Ollama puts the images of a message before its text
                    shown = shown.replace("a screen<|vision_start|>", "<|vision_start|>")
                assert shown in text and "So?" in text, (dialect.__name__, text)

    asyncio.run(check())


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_image_is_accepted_in_each_role(colours: str, role: str) -> None:
    async def check() -> None:
        async with scripted_server(colours, chat_template=IMAGES_IN_TOOLS) as server:
            server.say("Yes.")
            parts: Any = [{"type": "image_url", "image_url": {"url": URL}}]
            history: Any = [
                {"role": role, "content": parts} | ({"tool_call_id": "c1"} if role == "tool" else {}),
                QUESTION,
            ]
            await server.openai.chat.completions.create(model="default", messages=history)
            assert len(server.engines.requests[-1].images) == 1

    asyncio.run(check())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_model_rejects_images(dialect: Callable[[ScriptedServer], Awaitable[None]]) -> None:
    async def check() -> None:
        async with scripted_server() as server:
            errors = (openai.BadRequestError, anthropic.BadRequestError, httpx.HTTPStatusError)
            with pytest.raises(errors, match=r"(image|image_url|input_image) is not supported, only text is"):
                await dialect(server)

    asyncio.run(check())


def test_refusal_in_history_is_text() -> None:
    """``refusal`` is a content part in OpenAI's API."""

    async def check() -> None:
        async with scripted_server() as server:
            server.say("Yes.")
            refusal: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
            await server.openai.chat.completions.create(model="default", messages=[QUESTION, refusal, QUESTION])  # type: ignore[list-item]
            assert "I will not." in server.prompt

    asyncio.run(check())
