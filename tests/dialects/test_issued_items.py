"""Output of the server as input of later requests: as history in each dialect, and as references to stored items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_engine import ScriptedServer, scripted_server

from penstock.config.options import ServerOptions
from penstock.serve.chat.request import ROLES

QUESTION, RESULT = "What is there?", "nothing at all"
ANSWER = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>First I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"text": "up"}<|call|>'
    "<|start|>assistant<|channel|>analysis<|message|>And then?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Then down.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"text": "down"}<|call|>'
)
PARTS = ("First I look.", "Then down.", '"up"', '"down"', RESULT)
"""Parts of the answer, and the tool result: the next prompt must contain all of them."""
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.reasoning_content }}|{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function | tojson }}>{% endfor %}{% endfor %}"
    "{{ tools }}{# <|channel|>analysis<|message|> <|call|> #}[assistant]"
)
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
PLAIN: Any = {"model": "default"}
KEYS = ("first key", "second key")


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


async def chat(server: ScriptedServer) -> None:
    fields: dict[str, Any] = {"model": "default", "tools": [FUNCTION]}
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    message = (await server.openai.chat.completions.create(messages=history, **fields)).choices[0].message
    history += [message.model_dump()]
    history += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls or ()]
    await server.openai.chat.completions.create(messages=history, **fields)


async def messages(server: ScriptedServer) -> None:
    fields: Any = {"model": "default", "max_tokens": 99, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    fields["thinking"] = {"type": "adaptive"}
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    message = await server.anthropic.messages.create(messages=history, **fields)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "thinking", "text", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
        for block in message.content
        if block.type == "tool_use"
    ]
    history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    await server.anthropic.messages.create(messages=history, **fields)


async def responses(server: ScriptedServer) -> None:
    response = await server.openai.responses.create(input=QUESTION, store=False, **RESPONSES)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "reasoning", "message", "function_call"]
    history = [{"role": "user", "content": QUESTION}, *response.output, *results_of(response)]
    await server.openai.responses.create(input=history, store=False, **RESPONSES)


async def ollama(server: ScriptedServer) -> None:
    fields: dict[str, Any] = {"model": "default", "stream": False, "tools": [FUNCTION], "think": "low"}
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    message = (await server.http.post("/api/chat", json=fields | {"messages": history})).json()["message"]
    results = [{"role": "tool", "tool_name": "look", "content": RESULT} for _ in message["tool_calls"]]
    answer = await server.http.post("/api/chat", json=fields | {"messages": [*history, message, *results]})
    assert answer.status_code == 200, answer.text


RESPONSES: Any = {
    "model": "default",
    "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
}


def results_of(response: Any) -> list[dict[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]


@pytest.mark.parametrize("dialect", [chat, messages, responses, ollama])
def test_answer_is_accepted_as_history(dialect: Callable[[ScriptedServer], Awaitable[None]]) -> None:
    async def check() -> None:
        async with scripted_server(chat_template=TEMPLATE) as server:
            server.say(ANSWER)
            await dialect(server)
            assert [part for part in PARTS if part not in server.prompt] == []
            roles = [name for role in ROLES for name in [role] * server.prompt.count(f"[{role}]")]
            assert sorted(roles) == ["assistant", "assistant", "tool", "tool", "user"], "the answer is one message"

    asyncio.run(check())


def stored(folder: Path) -> Any:
    options = ServerOptions(storage_dir=str(folder), api_key=KEYS)
    return scripted_server(chat_template=TEMPLATE, server_options=options)


@pytest.mark.row("responses", "item_reference", "output")
def test_item_references_equal_full_items(tmp_path: Path) -> None:
    """References to input, output and conversation items are replaced by the referenced items."""

    async def check() -> None:
        async with stored(tmp_path / "storage") as server:
            server.say(ANSWER)
            create = server.openai.with_options(api_key=KEYS[0]).responses.create
            items = server.openai.with_options(api_key=KEYS[0]).conversations.items
            question: Any = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
            first = await create(input=[question], **RESPONSES)
            listed = await server.openai.with_options(api_key=KEYS[0]).responses.input_items.list(first.id)
            await create(input=[question, *first.output, *results_of(first)], **RESPONSES)
            expected = server.prompt
            ids = [item.id for item in (*listed.data, *first.output)]
            for reference in (lambda name: {"type": "item_reference", "id": name}, lambda name: {"id": name}):
                second = await create(input=[*map(reference, [*ids, *ids]), *results_of(first)], **RESPONSES)
                assert server.prompt == expected
            await create(input=[{"role": "user", "content": "Go on."}], previous_response_id=second.id, **RESPONSES)
            assert QUESTION in server.prompt and "First I look." in server.prompt, (
                "the stored input must contain the referenced items"
            )
            counted = await server.openai.with_options(api_key=KEYS[0]).responses.input_tokens.count(
                input=[{"type": "item_reference", "id": ids[-1]}], model="default"
            )
            assert counted.input_tokens > 10

            conversation = await server.openai.with_options(api_key=KEYS[0]).conversations.create(
                items=[{"type": "item_reference", "id": name} for name in ids]
            )
            stored_items = [item async for item in items.list(conversation.id, order="asc")]
            assert [item.type for item in stored_items] == ["message", *[item.type for item in first.output]]
            await create(input=[*({"id": item.id} for item in stored_items), *results_of(first)], **RESPONSES)
            assert server.prompt == expected

            other = server.openai.with_options(api_key=KEYS[1])
            for name in (first.output[1].id, first.output[2].id, stored_items[0].id, stored_items[2].id):
                with pytest.raises(openai.NotFoundError, match=f"item '{name}' is not stored"):
                    await other.responses.create(input=[question, {"type": "item_reference", "id": name}], **RESPONSES)

    asyncio.run(check())


def test_referenced_items_count_towards_body_limit(tmp_path: Path) -> None:
    """The limit applies to the body plus all stored items that the request references."""
    limits = ServerOptions(storage_dir=str(tmp_path / "kept"), api_key=KEYS, max_body_size=100_000)

    async def check() -> None:
        async with scripted_server(
            server_options=limits, chat_template="{% for m in messages %}{{ m.content | length }} {% endfor %}"
        ) as server:
            server.say("Yes.")
            client = server.openai.with_options(api_key=KEYS[0])
            create, conversations = client.responses.create, client.conversations
            messages: list[Any] = [{"role": "user", "content": "x" * 40_000}]
            stored_responses = [await create(input=messages, **PLAIN) for _ in range(3)]
            references: list[Any] = []
            for response in stored_responses:
                listed = await client.responses.input_items.list(response.id)
                references.append({"type": "item_reference", "id": listed.data[0].id})
            await create(input=references[:2], store=False, **PLAIN)
            assert server.prompt.split()[:2] == ["40000", "40000"]
            conversation = await conversations.create(items=references[:2])
            refused: list[dict[str, Any]] = [
                {"input": references},
                {"input": [*references[:2], *messages]},
                {"input": references[:1], "conversation": conversation.id},
                {"input": references[:2], "previous_response_id": stored_responses[0].id},
                {"input": messages, "conversation": conversation.id},
            ]
            for request in refused:
                for call in (create, client.responses.input_tokens.count):
                    with pytest.raises(openai.APIStatusError, match="the limit is 100000") as error:
                        await call(**request, **PLAIN)
                    assert error.value.status_code == 413
            with pytest.raises(openai.APIStatusError, match="the limit is 100000"):
                await conversations.items.create(conversation.id, items=references)

    asyncio.run(check())


def test_only_reasoning_references_are_accepted_without_storage() -> None:
    """Only references to reasoning items are ignored: AI SDK sends them in each step of a tool loop."""

    async def check() -> None:
        async with scripted_server(chat_template=TEMPLATE) as server:
            server.say(ANSWER)
            create = server.openai.responses.create
            question: Any = {"role": "user", "content": QUESTION}
            first = await create(input=[question], store=False, **RESPONSES)
            rest = [item for item in first.output if item.type != "reasoning"]
            await create(input=[question, *rest, *results_of(first)], store=False, **RESPONSES)
            expected = server.prompt
            history = [
                {"type": "item_reference", "id": item.id} if item.type == "reasoning" else item for item in first.output
            ]
            await create(input=[question, *history, *results_of(first)], store=False, **RESPONSES)
            assert server.prompt == expected
            for item in rest:
                with pytest.raises(openai.BadRequestError, match=r"input\[1\]: the server stores no items"):
                    await create(input=[question, {"type": "item_reference", "id": item.id}], store=False, **RESPONSES)
            with pytest.raises(openai.BadRequestError, match=r"input\[0\].id: is missing"):
                await create(input=[{"type": "item_reference"}], store=False, **RESPONSES)

    asyncio.run(check())
