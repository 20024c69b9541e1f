"""The beginning of an answer that a client sends: in the prompt as it was sent, and in the answer with ``echo``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedServer, scripted_server

KEEPING = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
TRIMMING = KEEPING.replace("message.content", "message.content | trim")
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
def test_prefills_are_kept_in_every_dialect(prefill: str) -> None:
    begun = {"role": "assistant", "content": prefill}

    async def check(server: ScriptedServer) -> None:
        server.say(" so.")
        goes_on = {"add_generation_prompt": False, "continue_final_message": True}
        said: list[Any] = [QUESTION, begun]
        await server.openai.chat.completions.create(model="default", messages=said, extra_body=goes_on)
        assert server.prompt == f"[user]Go on.[assistant]{prefill}"
        await server.anthropic.messages.create(model="default", max_tokens=9, messages=said)
        assert server.prompt == f"[user]Go on.[assistant]{prefill}"
        applied = await server.http.post("/apply-template", json={"messages": said, **goes_on})
        assert applied.json()["prompt"] == f"[user]Go on.[assistant]{prefill}"

    run(check, chat_template=KEEPING)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("template", [KEEPING, TRIMMING])
def test_echo_gives_the_text_of_the_prompt_and_the_answer(template: str, prefill: str, stream: bool) -> None:
    async def check(server: ScriptedServer) -> None:
        trimmed = template == TRIMMING and prefill[-1].isspace()
        answer = " so." if trimmed or not prefill[-1].isspace() else "so."
        server.say(answer)
        extra = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
        said: Any = [QUESTION, {"role": "assistant", "content": prefill}]
        asked: Any = {"model": "default", "messages": said, "extra_body": extra}
        if stream:
            chunks = [chunk async for chunk in await server.openai.chat.completions.create(**asked, stream=True)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = (await server.openai.chat.completions.create(**asked)).choices[0].message.content
        assert text == (prefill.rstrip() if trimmed else prefill) + answer

    run(check, chat_template=template)
