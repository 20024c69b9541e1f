"""JSON bodies and batch files: a byte order mark is skipped; a lone surrogate is rejected."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedServer, scripted_server

from penstock.serve.dialects.openai.batch import BatchError
from penstock.serve.dialects.openai.batches.results import requests

QUESTION: Any = [{"role": "user", "content": "Go on."}]
MARK = "\ufeff"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"max_tokens": 9, "messages": QUESTION},
    "/v1/responses": {"input": "x", "store": False},
    "/api/chat": {"model": "default", "messages": QUESTION, "stream": False},
    "/api/generate": {"model": "default", "prompt": "x", "stream": False},
    "/generate": {"prompt": "x"},
    "/completion": {"prompt": "x"},
    "/tokenize": {"prompt": "x"},
    "/v2/models/ensemble/generate": {"text_input": "x", "max_tokens": 4},
}
HALVES = {
    r'{"FIELD": "\ud800"}': "at the end",
    r'{"FIELD": "\ud800 and more of it"}': r"byte \d+",
    r'{"FIELD": "a \udc00"}': r"byte \d+",
    r'{"FIELD": "\ud83d\ud83d and more of it"}': r"byte \d+",
}
"""Bodies with a lone surrogate, and the position in the error message."""


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


def test_body_with_byte_order_mark_is_accepted_by_each_dialect() -> None:
    async def post(server: ScriptedServer, path: str, text: str) -> tuple[int, str]:
        answer = await server.http.post(path, content=text.encode())
        return answer.status_code, answer.text

    async def check() -> None:
        async with scripted_server() as server:
            server.say("Well.")
            for path, body in BODIES.items():
                assert (await post(server, path, MARK + json.dumps(body)))[0] == 200, path
                for text, where in HALVES.items():
                    status, message = await post(server, path, text.replace("FIELD", next(iter(body))))
                    assert status == 400 and "half of a surrogate pair" in message, path
                    assert ("at the end" in message) == (where == "at the end")
                status, message = await post(server, path, r'{"prompt": "\\ud800"')
                assert status == 400 and "truncated" in message

    asyncio.run(check())


def test_batch_file_with_byte_order_mark_is_read(tmp_path: Path) -> None:
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})
    half = line.replace('"x"', r'"\ud800"').replace('"1"', '"2"')
    file = tmp_path / "in.jsonl"
    file.write_text(f"{MARK}{line}\r\n{half}\n", encoding="utf-8")
    first, second = requests(file)
    assert not isinstance(first, BatchError) and first.custom_id == "1"
    assert isinstance(second, BatchError) and "line 2: JSON is malformed" not in second.message
    assert "half of a surrogate pair" in second.message


def test_top_logprobs_0_is_accepted_without_logprobs() -> None:
    async def check() -> None:
        async with scripted_server() as server:
            server.say("Well.")
            for extra in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}, {"logprobs": False}):
                body = {"messages": QUESTION, **extra}
                answer = await server.http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is None
            for extra in ({"logprobs": False, "top_logprobs": 2}, {"top_logprobs": 2}):
                answer = await server.http.post("/v1/chat/completions", json={"messages": QUESTION, **extra})
                assert answer.status_code == 400 and "requires logprobs" in answer.text

    asyncio.run(check())
