"""OpenAI's conversations API and responses in a conversation, tested with OpenAI's Python client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from serving import Served

CAPITAL, ANSWER = "What is the capital of Canada?", "Ottawa"
PLAIN: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 60}
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


def texts(client: openai.OpenAI, conversation: str) -> list[tuple[str, str]]:
    """Return (role, text) of a conversation's messages, oldest first."""
    items: Any = client.conversations.items.list(conversation, order="asc", limit=3)
    return [(item.role, item.content[0].text) for item in items if item.type == "message"]


@pytest.mark.row("responses", "conversation")
@pytest.mark.parametrize("mode", ["whole", "streamed", "background"])
def test_responses_share_a_conversation(client: openai.OpenAI, mode: str) -> None:
    conversation = client.conversations.create(metadata={"topic": "capitals"})

    def ask(question: str, **fields: Any) -> Response:
        request = {**PLAIN, "input": question, "conversation": conversation.id, **fields}
        if mode == "streamed":
            *_, last = client.responses.create(**request, stream=True)
            return last.response  # type: ignore[no-any-return]
        response: Response = client.responses.create(**request, background=mode == "background")
        deadline = time.monotonic() + 60
        while response.status in ("queued", "in_progress"):
            assert time.monotonic() < deadline
            response = client.responses.retrieve(response.id)
        return response

    first = ask(CAPITAL)
    assert first.conversation and first.conversation.id == conversation.id
    if mode == "background":  # the response is marked as completed just before its items are stored
        deadline = time.monotonic() + 30
        while len(texts(client, conversation.id)) < 2:
            assert time.monotonic() < deadline
    assert texts(client, conversation.id) == [("user", CAPITAL), ("assistant", first.output_text)]
    counted = client.responses.input_tokens.count(
        model="default", input="What did I ask?", conversation={"id": conversation.id}
    )
    second = ask("What did I ask?", conversation={"id": conversation.id})
    history: list[Any] = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": first.output_text}]
    whole = client.responses.create(
        **PLAIN, input=[*history, {"role": "user", "content": "What did I ask?"}], store=False
    )
    assert whole.usage and second.usage and whole.usage.input_tokens == second.usage.input_tokens
    assert counted.input_tokens == second.usage.input_tokens and whole.output_text == second.output_text
    if mode != "background":
        assert len(texts(client, conversation.id)) == 4


@pytest.mark.row("responses", "conversations.create", "retrieve", "update", "delete", "conversations.items")
def test_conversations_and_items_are_created_updated_and_deleted(client: openai.OpenAI) -> None:
    created = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "One."}], metadata={"topic": "demo"}
    )
    assert created.id.startswith("conv_") and created.object == "conversation" and created.metadata == {"topic": "demo"}
    assert client.conversations.retrieve(created.id) == created
    assert client.conversations.update(created.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    more: Any = [
        {"type": "message", "role": "assistant", "content": "Two."},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    added = client.conversations.items.create(created.id, items=more)
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
    listed = list(client.conversations.items.list(created.id, limit=2))  # pages of two, newest first
    assert [item.type for item in listed] == ["function_call_output", "function_call", "message", "message"]
    assert texts(client, created.id) == [("user", "One."), ("assistant", "Two.")]
    call: Any = client.conversations.items.retrieve(added.data[1].id or "", conversation_id=created.id)
    assert (call.name, call.status) == ("f", "completed")
    assert client.conversations.items.delete(added.data[0].id or "", conversation_id=created.id).id == created.id
    assert texts(client, created.id) == [("user", "One.")]
    with pytest.raises(openai.NotFoundError, match="has no item"):
        client.conversations.items.retrieve(added.data[0].id or "", conversation_id=created.id)
    assert client.conversations.delete(created.id).deleted
    for gone in (
        lambda: client.conversations.retrieve(created.id),
        lambda: client.conversations.items.list(created.id),
        lambda: client.responses.create(**PLAIN, input="?", conversation=created.id),
    ):
        with pytest.raises(openai.NotFoundError, match="does not exist or has expired"):
            gone()


def test_tool_result_continues_conversation(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool: Any = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": False}
    fields: dict[str, Any] = {**PLAIN, "tools": [tool], "conversation": client.conversations.create().id}
    (call,) = client.responses.create(**fields, input="What is the weather in Paris?").output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}
    assert "21" in client.responses.create(**fields, input=[result]).output_text


def test_conversation_keeps_items_of_unstored_response(client: openai.OpenAI) -> None:
    conversation = client.conversations.create().id
    response = client.responses.create(**PLAIN, input=CAPITAL, conversation=conversation, store=False)
    assert response.store is False and len(texts(client, conversation)) == 2
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_invalid_conversation_requests_are_rejected(client: openai.OpenAI, served: Served) -> None:
    conversation = client.conversations.create().id
    stored = client.responses.create(**PLAIN, input=CAPITAL)
    user = {"type": "message", "role": "user", "content": "x"}
    for call, message in (
        (lambda: client.conversations.create(items=[user] * 21), "items"),  # type: ignore[list-item]
        (lambda: client.conversations.create(metadata={"k": "v" * 513}), "metadata"),
        (lambda: client.conversations.items.create(conversation, items=[]), "items"),
        (
            lambda: client.conversations.items.create(conversation, items=[{"type": "web_search_call"}]),  # type: ignore[typeddict-item]
            r"items\[0\].type: web_search_call is not supported",
        ),
        (
            lambda: client.responses.create(
                **PLAIN, input="?", conversation=conversation, previous_response_id=stored.id
            ),
            "cannot be combined with conversation",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            call()  # type: ignore[no-untyped-call]
    with pytest.raises(openai.NotFoundError):  # the conversation belongs to another API key
        client_of(served, KEYS[1]).conversations.retrieve(conversation)


def test_stored_objects_are_unavailable_without_storage_dir() -> None:
    with Served("--num-gpu-blocks-override", "100") as server:
        client = client_of(server, "none")
        for call in (
            client.conversations.create,
            lambda: client.responses.retrieve("resp_1"),
            client.files.list,
            lambda: client.files.create(file=("x", b"x"), purpose="batch"),
            lambda: client.batches.retrieve("batch_1"),
        ):
            with pytest.raises(openai.NotFoundError, match="start the server with --storage-dir"):
                call()  # type: ignore[no-untyped-call]
        with pytest.raises(openai.BadRequestError, match=r"conversation: .*--storage-dir"):
            client.responses.create(**PLAIN, input="?", conversation="conv_1")
