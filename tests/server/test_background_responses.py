"""Background responses whose API process is killed: another process continues them, with the same output and events."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from serving import Served

FLAGS = ("--num-gpu-blocks-override", "400", "--max-num-seqs", "8")
STORY: dict[str, Any] = {
    "model": "default", "input": "Number 3: a story about a fox and its days.", "temperature": 0.9,
    "max_output_tokens": 1200, "text": {"format": {"type": "json_schema", "name": "numbers", "schema": {
        "type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 150}},
        "required": ["numbers"], "additionalProperties": False}}},
}  # fmt: skip
"""A request with a long output."""
TOOLS: dict[str, Any] = {
    "model": "default", "input": "What is the weather in Paris?", "tool_choice": "required", "temperature": 0.7,
    "tools": [{"type": "function", "name": "look", "strict": False, "parameters": STORY["text"]["format"]["schema"]}],
    "max_output_tokens": 1200,
}  # fmt: skip
"""A request whose output is a long tool call."""
KEYS = ("first key", "second key")
LIMIT = 120.0
"""Maximum seconds until a response of a killed process is finished."""


def client_of(server: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


def begin(client: openai.OpenAI, request: dict[str, Any], count: int = 40) -> list[ResponseStreamEvent]:
    """Start a streamed background response, and return its first events."""
    with client.responses.create(**request, background=True, stream=True) as stream:
        return [event for event, _ in zip(stream, range(count), strict=False)]


def rest_of(
    client: openai.OpenAI, name: str, after: int, on_event: Callable[[], None] | None = None
) -> list[ResponseStreamEvent]:
    """Return the events of a response after a sequence number. Connects again while the server is not reachable."""
    events: list[ResponseStreamEvent] = []
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            starting_after = after if after >= 0 else openai.omit
            with client.responses.retrieve(name, stream=True, starting_after=starting_after) as stream:
                for event in stream:
                    events.append(event)
                    after = event.sequence_number
                    if on_event:
                        on_event()
            return events
        except (openai.APIConnectionError, httpx.TransportError):
            assert time.monotonic() < deadline, events[-1:]


def check(client: openai.OpenAI, events: list[ResponseStreamEvent]) -> Response:
    """Check that the events are complete, and equal to the stored events and to the stored response."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    response = client.responses.retrieve(last.response.id)
    assert last.response == response and response.status in ("completed", "incomplete")
    assert rest_of(client, response.id, -1) == events
    deltas = "".join(getattr(event, "delta", "") for event in events)
    (item,) = response.output
    assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)  # type: ignore[union-attr]
    return response


def finished(client: openai.OpenAI, name: str) -> Response:
    """Wait for the end of a background response."""
    deadline = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < deadline
        try:
            response = client.responses.retrieve(name)
        except openai.APIConnectionError:
            continue
        if response.status not in ("queued", "in_progress"):
            return response


def wait_ready(server: Served) -> None:
    deadline = time.monotonic() + LIMIT
    while httpx.get(f"{server.root}/ready").status_code != 200:
        assert time.monotonic() < deadline


def kill_api_processes(server: Served) -> None:
    for pid in server.pids["api"]:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two API processes and two API keys."""
    folder = str(tmp_path_factory.mktemp("storage"))
    with Served("--storage-dir", folder, "--api-server-count", "2", "--api-key", ",".join(KEYS), *FLAGS) as server:
        yield server


@pytest.mark.row("responses", "background", "responses.retrieve")
@pytest.mark.parametrize("request_", [STORY, TOOLS], ids=["text", "tool call"])
def test_streamed_background_response_is_read_again(shared: Served, request_: dict[str, Any]) -> None:
    """Every connection may reach the computing process or the other one, and all get the same events."""
    client = client_of(shared, KEYS[0])
    events = begin(client, request_, 5)
    name = events[0].response.id  # type: ignore[union-attr]
    streams = [rest_of(client_of(shared, KEYS[0]), name, events[-1].sequence_number) for _ in range(4)]
    assert all(first == second for first, second in pairwise(streams))
    check(client, events + streams[0])


def test_stream_of_response_without_events_is_refused(shared: Served) -> None:
    client = client_of(shared, KEYS[0])
    whole = client.responses.create(**STORY | {"max_output_tokens": 3}, background=True)
    name = begin(client, STORY | {"max_output_tokens": 3}, 1)[0].response.id  # type: ignore[union-attr]
    finished(client, whole.id)
    finished(client, name)
    with pytest.raises(openai.BadRequestError, match="created with stream: true"):
        rest_of(client, whole.id, -1)
    with pytest.raises(openai.NotFoundError):  # the response belongs to another API key
        rest_of(client_of(shared, KEYS[1]), name, -1)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(name, stream=True, extra_query={"starting_after": "x"})


def test_response_of_killed_process_is_continued_with_the_same_events(tmp_path: Path) -> None:
    """The only API process is killed. Clients continue to read the streams, and get the events of one computation."""
    with Served("--storage-dir", str(tmp_path), *FLAGS) as server:
        client = client_of(server)
        begun = [begin(client, request) for request in (STORY, TOOLS)]
        whole = client.responses.create(**STORY, extra_body={"seed": 5}, background=True)
        kill_api_processes(server)
        for events in begun:
            check(client, events + rest_of(client, events[0].response.id, events[-1].sequence_number))  # type: ignore[union-attr]
        wait_ready(server)
        undisturbed = client.responses.create(**STORY, extra_body={"seed": 5})
        assert finished(client, whole.id).output_text == undisturbed.output_text
        server.find(f"background response {whole.id} continues in this process")


@pytest.mark.slow
def test_streams_are_continued_while_each_of_two_api_processes_is_killed(tmp_path: Path) -> None:
    with Served("--storage-dir", str(tmp_path), "--api-server-count", "2", *FLAGS) as server:
        begun = [begin(client_of(server), STORY, 10 * number) for number in range(1, 9)]
        first, second = server.pids["api"]
        os.kill(first, signal.SIGKILL)
        killed = False

        def kill_second() -> None:  # it computes continued responses, or is the one that serves the connection
            nonlocal killed
            if not killed:
                killed = True
                os.kill(second, signal.SIGKILL)

        for events in begun:
            name = events[0].response.id  # type: ignore[union-attr]
            check(client_of(server), events + rest_of(client_of(server), name, events[-1].sequence_number, kill_second))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_response_is_continued_after_restart_of_server(tmp_path: Path, kill: bool) -> None:
    """All processes of the server end, and a new server with the same storage continues the response, of another key,
    in its conversation."""
    flags = ("--storage-dir", str(tmp_path), "--api-key", ",".join(KEYS), *FLAGS)
    with Served(*flags) as server:
        client = client_of(server, KEYS[1])
        conversation = client.conversations.create().id
        events = begin(client, STORY | {"conversation": conversation})
        whole = client.responses.create(**STORY, extra_body={"seed": 7}, background=True)
        if kill:
            server.kill()
    with Served(*flags) as server:
        client = client_of(server, KEYS[1])
        response = check(client, events + rest_of(client, events[0].response.id, events[-1].sequence_number))  # type: ignore[union-attr]
        assert (
            client.responses.create(**STORY, extra_body={"seed": 7}).output_text
            == finished(client, whole.id).output_text
        )
        with pytest.raises(openai.NotFoundError):
            client_of(server, KEYS[0]).responses.retrieve(whole.id)
        items: list[Any] = client.conversations.items.list(conversation, order="asc").data
        assert [item.content[0].text for item in items] == [STORY["input"], response.output_text]


@pytest.mark.slow
def test_continued_response_is_cancelled(tmp_path: Path) -> None:
    """A response is cancelled or deleted while another process continues it."""
    with Served("--storage-dir", str(tmp_path), *FLAGS, "--max-num-seqs", "2") as server:
        client = client_of(server)
        cancelled, deleted = (client.responses.create(**STORY, background=True).id for _ in range(2))
        kill_api_processes(server)
        for name in (cancelled, deleted):
            server.find(f"background response {name} continues")
        assert client.responses.cancel(cancelled).status == "cancelled"
        client.responses.delete(deleted)
        wait_ready(server)
        assert client.responses.create(**STORY | {"max_output_tokens": 5}).output_text  # the engine has free slots
        assert client.responses.retrieve(cancelled).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(deleted)


@pytest.mark.slow
def test_response_that_has_ended_three_processes_fails(tmp_path: Path) -> None:
    with Served("--storage-dir", str(tmp_path), *FLAGS) as server:
        client = client_of(server)
        events = begin(client, STORY)
        name = events[0].response.id  # type: ignore[union-attr]
        server.kill()
    with sqlite3.connect(tmp_path / "penstock.db") as database:  # two processes had ended before this one
        database.execute("update responses set deaths = 2")
    with Served("--storage-dir", str(tmp_path), *FLAGS) as server:
        client = client_of(server)
        failed = finished(client, name)
        assert failed.status == "failed" and failed.error and "3 API processes have ended" in failed.error.message
        last: Any = rest_of(client, name, events[-1].sequence_number)[-1]
        assert last.type == "response.failed" and last.response == failed


@pytest.mark.slow
def test_response_fails_after_three_kills_of_its_process(tmp_path: Path) -> None:
    """The server stays alive."""
    with Served("--storage-dir", str(tmp_path), *FLAGS) as server:
        client = client_of(server)
        poison = client.responses.create(**STORY, background=True).id
        for attempt in range(3):
            after = len(server.lines)
            kill_api_processes(server)
            if attempt < 2:
                server.find(f"background response {poison} continues", after, limit=90)
        assert "3 API processes have ended" in str(finished(client, poison).error)
        wait_ready(server)
        assert client.responses.create(**STORY | {"max_output_tokens": 5}).status == "incomplete"
