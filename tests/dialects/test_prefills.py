"""Prefilled answers: the prompt ends with the unmodified prefill, and with ``echo`` the answer begins with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedServer, scripted_server

UNMODIFIED = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
TRIMMED = UNMODIFIED.replace("message.content", "message.content | trim")
QUESTION = {"role": "user", "content": "Go on."}
PREFILLS = ["It is", "It is ", "  It is", "def f():\n    "]


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


def run(check: Callable[[ScriptedServer], Any], **options: Any) -> None:
    async def started() -> None:
        async with scripted_server(**options) as server:
            await check(server)

    asyncio.run(started())


@pytest.mark.parametrize("prefill", PREFILLS)
def test_prefill_is_unmodified_in_prompt_of_each_dialect(prefill: str) -> None:
    last = {"role": "assistant", "content": prefill}

    async def check(server: ScriptedServer) -> None:
        server.say(" so.")
        continuing = {"add_generation_prompt": False, "continue_final_message": True}
        messages: list[Any] = [QUESTION, last]
        await server.openai.chat.completions.create(model="default", messages=messages, extra_body=continuing)
        assert server.prompt == f"[user]Go on.[assistant]{prefill}"
        await server.anthropic.messages.create(model="default", max_tokens=9, messages=messages)
        assert server.prompt == f"[user]Go on.[assistant]{prefill}"
        applied = await server.http.post("/apply-template", json={"messages": messages, **continuing})
        assert applied.json()["prompt"] == f"[user]Go on.[assistant]{prefill}"

    run(check, chat_template=UNMODIFIED)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("template", [UNMODIFIED, TRIMMED])
def test_echo_returns_prefill_and_answer(template: str, prefill: str, stream: bool) -> None:
    async def check(server: ScriptedServer) -> None:
        trimmed = template == TRIMMED and prefill[-1].isspace()
        answer = " so." if trimmed or not prefill[-1].isspace() else "so."
        server.say(answer)
        extra = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
        messages: Any = [QUESTION, {"role": "assistant", "content": prefill}]
        fields: Any = {"model": "default", "messages": messages, "extra_body": extra}
        if stream:
            chunks = [chunk async for chunk in await server.openai.chat.completions.create(**fields, stream=True)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = (await server.openai.chat.completions.create(**fields)).choices[0].message.content
        assert text == (prefill.rstrip() if trimmed else prefill) + answer

    run(check, chat_template=template)
