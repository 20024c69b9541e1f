"""The example dialect of docs/architecture/dialects.md, run in a server: answers, streams, errors, OpenAPI document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedServer, scripted_server
from test_docs import DOCS, blocks

from penstock.serve.dialects import cohere

PATH = "/acme/ask"


@pytest.fixture(autouse=True)
def metrics_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the page's dialect after Cohere's."""
    (code,) = [text for language, text in blocks(DOCS / "architecture/dialects.md") if language == "python"]
    namespace: dict[str, Any] = {"__name__": "acme"}
    exec(compile(code, "dialects.md", "exec", dont_inherit=True), namespace)
    add_routes, add_cohere = namespace["add_routes"], cohere.add_routes

    def add_both(*arguments: Any) -> None:
        add_cohere(*arguments)
        add_routes(*arguments)

    monkeypatch.setattr(cohere, "add_routes", add_both)


def run(check: Callable[[ScriptedServer], Any]) -> None:
    async def main() -> None:
        async with scripted_server() as server:
            await check(server)

    asyncio.run(main())


def test_page_dialect_returns_answer_and_stream() -> None:
    async def check(server: ScriptedServer) -> None:
        server.say("Otta", "wa.")
        answer = await server.http.post(PATH, json={"question": "What is the capital of Canada?"})
        assert answer.json() == {"reply": "Ottawa."}
        assert "What is the capital of Canada?" in server.prompt
        streamed = await server.http.post(PATH, json={"question": "And now?", "stream": True, "max_words": 7})
        events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
        assert "".join(each["reply"] for each in events) == "Ottawa." and len(events) > 1
        assert server.engines.requests[-1].sampling.max_tokens == 7

    run(check)


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "question"), ({"question": 5}, "question"), ({"question": "", "max_words": -1}, "max_words")],
)
def test_page_dialect_reports_errors_in_its_format(body: dict[str, Any], field: str) -> None:
    async def check(server: ScriptedServer) -> None:
        answer = await server.http.post(PATH, json=body)
        assert answer.status_code == 400
        assert answer.json().keys() == {"problem", "field"} and answer.json()["field"] == field

    run(check)


def test_page_dialect_is_in_openapi_document() -> None:
    async def check(server: ScriptedServer) -> None:
        document = (await server.http.get("/openapi.json")).json()
        assert "post" in document["paths"][PATH]
        assert {"acme.AskRequest", "acme.Answer"} <= document["components"]["schemas"].keys()

    run(check)
