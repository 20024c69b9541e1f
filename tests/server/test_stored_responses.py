"""Stored responses, used with OpenAI's client."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from serving import Served

CAPITAL, ANSWER = "What is the capital of Canada?", "Ottawa"
PLAIN: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 60}
LONG: dict[str, Any] = {"model": "default", "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
KEYS = ("first key", "second key")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("storage")
    flags = ["--api-key", ",".join(KEYS), "--storage-dir", str(folder), "--api-server-count", "2"]
    with Served(*flags, "--num-gpu-blocks-override", "400", "--max-num-seqs", "4") as server:
        yield server


def client_of(server: Served, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def until(client: openai.OpenAI, name: str, condition: Callable[[Response], bool]) -> Response:
    """Poll a response until the condition holds; return the response."""
    deadline = time.monotonic() + 60
    while not condition(response := client.responses.retrieve(name)):
        assert time.monotonic() < deadline, response
    return response


@pytest.mark.slow
@pytest.mark.row("responses", "responses.retrieve", "cancel", "delete", "input_items", "previous_response_id")
@pytest.mark.parametrize("stream", [False, True])
def test_previous_response_id_continues_conversation(client: openai.OpenAI, stream: bool) -> None:
    def ask(**fields: Any) -> Response:
        if not stream:
            return client.responses.create(**PLAIN, **fields)
        *_, last = client.responses.create(**PLAIN, **fields, stream=True)
        return last.response  # type: ignore[union-attr]

    first = ask(input=CAPITAL, instructions="Be brief.")
    assert ANSWER in first.output_text and first.store
    assert client.responses.retrieve(first.id) == first
    second = ask(input="What did I ask?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    items: list[Any] = [{"role": "user", "content": CAPITAL}, *[item.model_dump() for item in first.output]]
    stateless = client.responses.create(
        **PLAIN, input=[*items, {"role": "user", "content": "What did I ask?"}], store=False
    )
    assert stateless.output_text == second.output_text  # the instructions of previous turns are not repeated
    assert stateless.usage and second.usage and stateless.usage.input_tokens == second.usage.input_tokens
    counted = client.responses.input_tokens.count(
        model="default", input="What did I ask?", previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens
    (item,) = client.responses.input_items.list(second.id).data
    assert item.content[0].text == "What did I ask?"  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for request in (lambda: client.responses.retrieve(first.id), lambda: ask(input="?", previous_response_id=first.id)):
        with pytest.raises(openai.NotFoundError, match="does not exist or has expired"):
            request()
    assert client.responses.retrieve(second.id) == second


def test_tool_result_continues_stored_response(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool: Any = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": False}
    first = client.responses.create(**PLAIN, input="What is the weather in Paris?", tools=[tool])
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}
    assert (
        "21"
        in client.responses.create(**PLAIN, input=[result], previous_response_id=first.id, tools=[tool]).output_text
    )


@pytest.mark.row("responses", "store")
def test_unstored_or_foreign_response_is_not_found(client: openai.OpenAI, served: Served) -> None:
    unstored = client.responses.create(**PLAIN, input=CAPITAL, store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    stored = client.responses.create(**PLAIN, input=CAPITAL)
    with pytest.raises(openai.NotFoundError):  # the response belongs to another API key
        client_of(served, KEYS[1]).responses.retrieve(stored.id)


def test_input_items_are_paginated(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": f"Number {number}."} for number in range(7)]
    name = client.responses.create(**PLAIN, input=turns).id
    for order, expected in (("asc", turns), ("desc", turns[::-1])):
        listed = list(client.responses.input_items.list(name, limit=3, order=order))  # type: ignore[arg-type]
        assert [item.content for item in listed] == [turn["content"] for turn in expected]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.responses.input_items.list(name, limit=1000)


@pytest.mark.row("responses", "background")
def test_background_response_is_computed_and_cancelled(client: openai.OpenAI) -> None:
    queued = client.responses.create(**PLAIN, input=CAPITAL, background=True)
    assert queued.status == "queued" and queued.background
    ended = until(client, queued.id, lambda response: response.status not in ("queued", "in_progress"))
    assert ended.status == "completed" and ANSWER in ended.output_text
    slow = client.responses.create(**LONG, input="Go on.", background=True)
    until(client, slow.id, lambda response: response.status == "in_progress")
    assert client.responses.cancel(slow.id).status == "cancelled"
    assert client.responses.retrieve(slow.id).status == "cancelled"
    assert client.responses.cancel(queued.id).status == "completed"  # a completed response is returned unchanged
    with pytest.raises(openai.BadRequestError, match="leave store out"):
        client.responses.create(**PLAIN, input=CAPITAL, background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="not a background response"):
        client.responses.cancel(client.responses.create(**PLAIN, input=CAPITAL).id)


@pytest.mark.slow
def test_stored_responses_survive_restart_and_kill(tmp_path: Path) -> None:
    """After a restart, stored responses are still available, except a pending one of a version that stored no
    requests."""
    url = f"sqlite:///{tmp_path}/own.db"
    with Served("--storage-url", url) as server:
        client = client_of(server, "none")
        stored = client.responses.create(**PLAIN, input=CAPITAL)
        lost = client.responses.create(**LONG, input="Go on.", background=True)
        until(client, lost.id, lambda response: response.status == "in_progress")
        server.kill()
    with sqlite3.connect(tmp_path / "own.db") as database:
        database.execute("update responses set worker = null, request = null")
    with Served("--storage-url", url) as server:
        client = client_of(server, "none")
        assert client.responses.retrieve(stored.id) == stored
        failed = client.responses.retrieve(lost.id)
        assert failed.status == "failed" and failed.error and "has ended" in failed.error.message
        again = client.responses.create(**PLAIN, input="And of France?", previous_response_id=stored.id)
        assert again.status == "completed"


def test_repeated_request_id_replaces_no_response(served: Served, client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "mine"}
    first = client.responses.create(**PLAIN, input=CAPITAL, extra_headers=headers)
    other = client_of(served, KEYS[1]).responses.create(**PLAIN, input="Hello.", extra_headers=headers)
    assert first.id != other.id and client.responses.retrieve(first.id) == first


def test_cancelled_or_deleted_responses_are_not_overwritten_by_results(client: openai.OpenAI) -> None:
    """Some responses are not computed yet, and some requests reach another API process than the computing one."""
    names = [client.responses.create(**LONG, input="Go on.", background=True).id for _ in range(8)]
    for name in names[::2]:
        client.responses.cancel(name)
    for name in names[1::2]:
        client.responses.delete(name)
    assert ANSWER in client.responses.create(**PLAIN, input=CAPITAL).output_text  # all engine slots must be free again
    for name in names[::2]:
        assert client.responses.retrieve(name).status == "cancelled"
    for name in names[1::2]:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


@pytest.mark.slow
def test_pages_of_other_sites_cannot_read_storage(tmp_path: Path) -> None:
    """Without API keys, any web page could send requests through a browser on this machine."""
    with Served("--storage-dir", str(tmp_path), "--allowed-origins", "https://friend.example") as server:
        host = httpx.URL(server.root).netloc.decode()
        for path in ("/v1/files", "/v1/batches", "/v1/responses/resp_1", "/v1/conversations/conv_1"):
            for origin in ("https://other.example", "null"):
                assert httpx.get(server.root + path, headers={"Origin": origin}).status_code == 401
            for origin in ("https://friend.example", f"http://{host}"):
                assert httpx.get(server.root + path, headers={"Origin": origin}).status_code in (200, 404)
            assert httpx.get(server.root + path, headers={"Host": "rebound.example"}).status_code == 401
        assert httpx.get(f"{server.root}/v1/models", headers={"Origin": "https://other.example"}).status_code == 200


@pytest.mark.slow
def test_storage_url_is_masked(tmp_path: Path) -> None:
    with Served("--storage-url", f"sqlite:///{tmp_path}/own.db?secret=word") as server:
        assert "secret=word" not in httpx.get(f"{server.root}/config-info").text + "".join(server.lines)


@pytest.mark.slow
def test_responses_expire_after_retention(tmp_path: Path) -> None:
    with Served("--storage-dir", str(tmp_path), "--storage-retention", "0.00001") as server:
        client = client_of(server, "none")
        stored = client.responses.create(**PLAIN, input=CAPITAL)
        deadline = time.monotonic() + 30
        while httpx.get(f"{server.url}/responses/{stored.id}").status_code == 200:
            assert time.monotonic() < deadline


@pytest.mark.slow
def test_unusable_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flags, message in (
        (["--storage-url", "nosuch://x"], "storage_url: .*URL of SQLAlchemy"),
        (["--storage-dir", str(tmp_path / "file")], "storage_dir: the database cannot be opened"),
    ):
        server = Served(*flags)
        try:
            server.find(message)
            assert server.ended() != 0
        finally:
            server.kill()
