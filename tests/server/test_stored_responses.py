"""Responses that the server keeps, as OpenAI's own client speaks of them."""

from __future__ import annotations

import os
import signal
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


def until(client: openai.OpenAI, name: str, wanted: Callable[[Response], bool]) -> Response:
    """Ask for a response until it is as wanted."""
    deadline = time.monotonic() + 60
    while not wanted(found := client.responses.retrieve(name)):
        assert time.monotonic() < deadline, found
    return found


@pytest.mark.row("responses", "responses.retrieve", "cancel", "delete", "input_items", "previous_response_id")
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation(client: openai.OpenAI, stream: bool) -> None:
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
    said: list[Any] = [{"role": "user", "content": CAPITAL}, *[item.model_dump() for item in first.output]]
    whole = client.responses.create(**PLAIN, input=[*said, {"role": "user", "content": "What did I ask?"}], store=False)
    assert whole.output_text == second.output_text  # of what came before all but the instructions is there
    assert whole.usage and second.usage and whole.usage.input_tokens == second.usage.input_tokens
    counted = client.responses.input_tokens.count(
        model="default", input="What did I ask?", previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens
    (item,) = client.responses.input_items.list(second.id).data
    assert item.content[0].text == "What did I ask?"  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for gone in (lambda: client.responses.retrieve(first.id), lambda: ask(input="?", previous_response_id=first.id)):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            gone()
    assert client.responses.retrieve(second.id) == second


def test_tools_go_on(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool: Any = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": False}
    asked = client.responses.create(**PLAIN, input="What is the weather in Paris?", tools=[tool])
    (call,) = asked.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}
    assert (
        "21"
        in client.responses.create(**PLAIN, input=[result], previous_response_id=asked.id, tools=[tool]).output_text
    )


@pytest.mark.row("responses", "store")
def test_what_is_not_kept(client: openai.OpenAI, served: Served) -> None:
    unkept = client.responses.create(**PLAIN, input=CAPITAL, store=False)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    kept = client.responses.create(**PLAIN, input=CAPITAL)
    with pytest.raises(openai.NotFoundError):  # another key's
        client_of(served, KEYS[1]).responses.retrieve(kept.id)


def test_input_is_listed_in_pages(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": f"Number {number}."} for number in range(7)]
    name = client.responses.create(**PLAIN, input=turns).id
    for order, wanted in (("asc", turns), ("desc", turns[::-1])):
        listed = list(client.responses.input_items.list(name, limit=3, order=order))  # type: ignore[arg-type]
        assert [item.content for item in listed] == [turn["content"] for turn in wanted]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.responses.input_items.list(name, limit=1000)


@pytest.mark.row("responses", "background")
def test_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(**PLAIN, input=CAPITAL, background=True)
    assert begun.status == "queued" and begun.background
    ended = until(client, begun.id, lambda response: response.status not in ("queued", "in_progress"))
    assert ended.status == "completed" and ANSWER in ended.output_text
    slow = client.responses.create(**LONG, input="Go on.", background=True)
    until(client, slow.id, lambda response: response.status == "in_progress")
    assert client.responses.cancel(slow.id).status == "cancelled"
    assert client.responses.retrieve(slow.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "completed"  # as it had ended
    with pytest.raises(openai.BadRequestError, match="cannot be combined with background"):
        client.responses.create(**PLAIN, input=CAPITAL, background=True, stream=True)
    with pytest.raises(openai.BadRequestError, match="leave store out"):
        client.responses.create(**PLAIN, input=CAPITAL, background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="not a background response"):
        client.responses.cancel(client.responses.create(**PLAIN, input=CAPITAL).id)


def test_a_restart_and_a_kill(tmp_path: Path) -> None:
    """What is stored outlives the server, and a response whose process is killed has failed."""
    url = f"sqlite:///{tmp_path}/own.db"
    with Served("--storage-url", url) as server:
        client = client_of(server, "none")
        kept = client.responses.create(**PLAIN, input=CAPITAL)
        lost = client.responses.create(**LONG, input="Go on.", background=True)
        until(client, lost.id, lambda response: response.status == "in_progress")
        (api,) = server.pids["api"]
        os.kill(api, signal.SIGKILL)
    with sqlite3.connect(tmp_path / "own.db") as database:  # as if the time had passed
        database.execute("update responses set beat = beat - 60")
        assert (tmp_path / "own.db").exists()
    with Served("--storage-url", url) as server:
        client = client_of(server, "none")
        assert client.responses.retrieve(kept.id) == kept
        failed = client.responses.retrieve(lost.id)
        assert failed.status == "failed" and failed.error and "has ended" in failed.error.message
        again = client.responses.create(**PLAIN, input="And of France?", previous_response_id=kept.id)
        assert again.status == "completed"


def test_a_client_s_request_id_replaces_nothing(served: Served, client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "mine"}
    first = client.responses.create(**PLAIN, input=CAPITAL, extra_headers=headers)
    other = client_of(served, KEYS[1]).responses.create(**PLAIN, input="Hello.", extra_headers=headers)
    assert first.id != other.id and client.responses.retrieve(first.id) == first


def test_what_was_cancelled_or_deleted_stays_so(client: openai.OpenAI) -> None:
    """Also where that comes before it is computed, and in a process that does not compute it."""
    begun = [client.responses.create(**LONG, input="Go on.", background=True).id for _ in range(8)]
    for name in begun[::2]:
        client.responses.cancel(name)
    for name in begun[1::2]:
        client.responses.delete(name)
    assert ANSWER in client.responses.create(**PLAIN, input=CAPITAL).output_text  # there is room again
    for name in begun[::2]:
        assert client.responses.retrieve(name).status == "cancelled"
    for name in begun[1::2]:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


def test_pages_of_other_sites(tmp_path: Path) -> None:
    """A browser on this machine sends them for any site, where no key is asked for."""
    with Served("--storage-dir", str(tmp_path), "--allowed-origins", "https://friend.example") as server:
        own = httpx.URL(server.root).netloc.decode()
        for path in ("/v1/files", "/v1/batches", "/v1/responses/resp_1", "/v1/conversations/conv_1"):
            for origin in ("https://other.example", "null"):
                assert httpx.get(server.root + path, headers={"Origin": origin}).status_code == 401
            for origin in ("https://friend.example", f"http://{own}"):
                assert httpx.get(server.root + path, headers={"Origin": origin}).status_code in (200, 404)
            assert httpx.get(server.root + path, headers={"Host": "rebound.example"}).status_code == 401
        assert httpx.get(f"{server.root}/v1/models", headers={"Origin": "https://other.example"}).status_code == 200


def test_the_database_s_address_is_secret(tmp_path: Path) -> None:
    with Served("--storage-url", f"sqlite:///{tmp_path}/own.db?secret=word") as server:
        assert "secret=word" not in httpx.get(f"{server.root}/config-info").text + "".join(server.lines)


def test_responses_expire(tmp_path: Path) -> None:
    with Served("--storage-dir", str(tmp_path), "--storage-retention", "0.00001") as server:
        client = client_of(server, "none")
        kept = client.responses.create(**PLAIN, input=CAPITAL)
        deadline = time.monotonic() + 30
        while httpx.get(f"{server.url}/responses/{kept.id}").status_code == 200:
            assert time.monotonic() < deadline


def test_databases_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flags, words in (
        (["--storage-url", "nosuch://x"], "storage_url: .*URL of SQLAlchemy"),
        (["--storage-dir", str(tmp_path / "file")], "storage_dir: the database cannot be opened"),
    ):
        server = Served(*flags)
        try:
            server.find(words)
            assert server.ended() != 0
        finally:
            server.kill()
