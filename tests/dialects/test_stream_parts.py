"""Streamed answers of each dialect equal whole answers, however tokens are grouped into steps.

Answers have text, reasoning and tool calls in any order, and ``scripted_engine`` groups their tokens at random. Answers
of dialects with an official client are read with it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from scripted_engine import ScriptedServer, scripted_server

EXAMPLES = int(os.environ.get("PENSTOCK_STREAM_PARTS", "12"))
"""Number of random answers per format. Each is requested in every dialect."""
QUESTION = [{"role": "user", "content": "Go on."}]
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
NAMES = ("look", "write")


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


class Part(NamedTuple):
    kind: str
    """Kind of the part: ``reasoning``, ``content`` or ``call``."""
    text: str
    """Text of the part, or arguments of a call."""
    name: str = ""
    """Function name of a call; "" for other kinds."""


def hermes(parts: list[Part]) -> str:
    templates = {
        "reasoning": "<think>\n{}\n</think>\n\n",
        "content": "{}",
        "call": '<tool_call>\n{{"name": "NAME", "arguments": {}}}\n</tool_call>',
    }
    return "".join(templates[part.kind].replace("NAME", part.name).format(part.text) for part in parts)


def harmony(parts: list[Part]) -> str:
    templates = {
        "reasoning": "<|channel|>analysis<|message|>{}<|end|>",
        "content": "<|channel|>final<|message|>{}<|end|>",
        "call": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>",
    }
    return "<|start|>assistant".join(
        templates[part.kind].replace("NAME", part.name).format(part.text) for part in parts
    )


HARMONY_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{{ tools }}{# <|channel|>analysis<|message|> <|call|> #}<|start|>assistant"
)
FORMATS: dict[str, tuple[Callable[[list[Part]], str], dict[str, Any]]] = {
    "hermes": (hermes, {}),
    "harmony": (harmony, {"chat_template": HARMONY_TEMPLATE}),
}

WORDS = st.sampled_from(["Let me look", "é 🦊", "a < b", "{1}", "No", "well, well", "42", "<b>"])
TEXT = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)
ARGUMENTS = st.dictionaries(st.sampled_from(["text", "n"]), TEXT, max_size=2).map(
    lambda arguments: json.dumps(arguments, ensure_ascii=False)
)
CALL = st.builds(Part, st.just("call"), ARGUMENTS, st.sampled_from(NAMES))
CONTENT, REASONING = (st.builds(Part, st.just(kind), TEXT, st.just("")) for kind in ("content", "reasoning"))


def answers(form: str) -> st.SearchStrategy[list[Part]]:
    """Return a strategy for the answers that the format can express."""
    if form == "harmony":
        return st.lists(CALL | CONTENT | REASONING, min_size=1, max_size=7)
    rest = st.lists(CALL | CONTENT, min_size=1, max_size=6)
    return st.builds(lambda first, rest: [*first, *rest], st.lists(REASONING, max_size=1), rest)


def joined(parts: Iterator[Part]) -> dict[str, Any]:
    """Return the concatenated text of each kind, and the list of calls."""
    parts = list(parts)
    texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "content")}
    return texts | {"calls": [(part.name, part.text) for part in parts if part.kind == "call"]}


# --- Dialects: each function returns the joined parts of a whole answer and of a stream -------------------------------


async def chat(server: ScriptedServer) -> tuple[Any, Any]:
    client = server.openai
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    fields: dict[str, Any] = {"model": "default", "messages": QUESTION, "tools": tools}
    fields["parallel_tool_calls"] = not server.single_tool_call
    extra = THINKING | {"include_reasoning": not server.hide_reasoning}
    whole = await client.chat.completions.create(**fields, extra_body=extra)
    message: Any = whole.choices[0].message
    found = joined(
        [
            Part("reasoning", message.reasoning_content or ""),
            Part("content", message.content or ""),
            *(Part("call", call.function.arguments, call.function.name) for call in message.tool_calls or ()),
        ]
    )
    parts: list[Part] = []
    reasons, state = [], ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(**fields, stream=True, extra_body=extra):
        state.handle_chunk(chunk)
        (choice,) = chunk.choices
        delta: Any = choice.delta
        kinds = [bool(delta.content), bool(getattr(delta, "reasoning_content", "")), bool(delta.tool_calls)]
        assert sum(kinds) <= 1 and not (any(kinds) and choice.finish_reason), "a chunk must have at most one part"
        assert not reasons
        reasons += [choice.finish_reason] * bool(choice.finish_reason)
        parts += [
            Part("reasoning", getattr(delta, "reasoning_content", "") or ""),
            Part("content", delta.content or ""),
        ]
        for call in delta.tool_calls or ():
            calls = [index for index, part in enumerate(parts) if part.kind == "call"]
            if call.id:
                assert call.index == len(calls)
                parts.append(Part("call", call.function.arguments or "", call.function.name))
            else:
                assert call.index == len(calls) - 1
                parts[calls[-1]] = parts[calls[-1]]._replace(text=parts[calls[-1]].text + call.function.arguments)
    assert reasons == [whole.choices[0].finish_reason]
    final: Any = state.get_final_completion().choices[0].message
    assert final.content == message.content or not message.content
    called = [(call.function.name, call.function.arguments) for call in final.tool_calls or ()]
    assert called == found["calls"], "calls accumulated by OpenAI's client"
    return found, joined(parts)


def block_part(content_block: Any) -> Part:
    if content_block.type == "tool_use":
        return Part("call", json.dumps(content_block.input, ensure_ascii=False), content_block.name)
    return (
        Part("content", content_block.text)
        if content_block.type == "text"
        else Part("reasoning", content_block.thinking)
    )


async def messages(server: ScriptedServer) -> tuple[Any, Any]:
    client = server.anthropic
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    fields: Any = {"model": "default", "max_tokens": 9999, "messages": QUESTION, "tools": tools}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 9000} if server.thinking else {"type": "adaptive"}
    if server.hide_reasoning:
        fields["thinking"]["display"] = "omitted"
    if server.single_tool_call:
        fields["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    whole = await client.messages.create(**fields)
    raw: dict[int, str] = {}
    async with client.messages.stream(**fields) as stream:
        async for event in stream:
            if event.type == "content_block_delta":
                delta: Any = event.delta
                added = next(
                    getattr(delta, name) for name in ("text", "thinking", "partial_json") if hasattr(delta, name)
                )
                raw[event.index] = raw.get(event.index, "") + added
        final = await stream.get_final_message()
    assert [block_part(content_block) for content_block in final.content] == [
        block_part(content_block) for content_block in whole.content
    ]
    for index, content_block in enumerate(final.content):
        if content_block.type != "tool_use":
            assert raw[index] == block_part(content_block).text
        else:
            assert json.loads(raw[index]) == content_block.input
    assert final.stop_reason == whole.stop_reason
    return joined(map(block_part, whole.content)), joined(map(block_part, final.content))


def item_part(output_item: Any) -> Part:
    if output_item.type == "function_call":
        return Part("call", output_item.arguments, output_item.name)
    return Part(
        "content" if output_item.type == "message" else "reasoning", "".join(part.text for part in output_item.content)
    )


async def responses(server: ScriptedServer) -> tuple[Any, Any]:
    client = server.openai
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES]
    fields: Any = {"model": "default", "input": QUESTION, "tools": tools, "extra_body": THINKING}
    fields["parallel_tool_calls"] = not server.single_tool_call
    whole = await client.responses.create(**fields)
    parts: list[Part] = []
    async for event in await client.responses.create(**fields, stream=True):
        if event.type == "response.output_item.added":
            parts.append(item_part(event.item))
        elif event.type.endswith((".delta",)):
            assert event.output_index == len(parts) - 1
            parts[-1] = parts[-1]._replace(text=parts[-1].text + event.delta)
        elif event.type == "response.output_item.done":
            assert item_part(event.item) == parts[event.output_index]
        elif event.type == "response.completed":
            assert [item_part(output_item) for output_item in event.response.output] == parts
    assert event.type == "response.completed"
    assert [item_part(output_item) for output_item in whole.output] == parts
    return joined(map(item_part, whole.output)), joined(iter(parts))


async def lines(server: ScriptedServer, path: str, body: Any, headers: dict[str, str] | None = None) -> list[Any]:
    """Return the documents of a stream of JSON lines."""
    answer = await server.http.post(path, json=body | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data:").strip() for line in answer.text.splitlines()]
    return [json.loads(line) for line in data if line.startswith("{")]


async def ollama(server: ScriptedServer) -> tuple[Any, Any]:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    body = {"model": "default", "messages": QUESTION, "tools": tools}
    if server.thinking:
        body["think"] = True

    def message_parts(message: Any) -> list[Part]:
        return [
            Part("reasoning", message.get("thinking", "")),
            Part("content", message["content"]),
            *(
                Part("call", json.dumps(call["function"]["arguments"], ensure_ascii=False), call["function"]["name"])
                for call in message.get("tool_calls", ())
            ),
        ]

    whole = (await server.http.post("/api/chat", json=body | {"stream": False})).json()
    streamed = await lines(server, "/api/chat", body)
    return joined(message_parts(whole["message"])), joined(
        [part for line in streamed for part in message_parts(line["message"])]
    )


async def bladellm(server: ScriptedServer) -> tuple[Any, Any]:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    body = {"messages": QUESTION, "tools": tools, **THINKING}
    whole = (await server.http.post("/v1/chat/completions", json=body, headers={"Authorization": "TOKEN"})).json()
    message = whole["choices"][0]["message"]
    calls: list[list[str]] = []
    texts = {"reasoning": "", "content": ""}
    chunks = await lines(server, "/v1/chat/completions", body, {"Authorization": "TOKEN"})
    assert [i for i, chunk in enumerate(chunks) if chunk["choices"][0]["delta"].get("role")] == [0]
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        texts["content"] += delta.get("content") or ""
        texts["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    expected = {
        "reasoning": message.get("reasoning_content") or "",
        "content": message["content"] or "",
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())],
    }
    return expected, texts | {"calls": [(name, arguments) for name, arguments in calls]}


PLAIN: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}, lambda answer: answer["choices"][0]["text"]),
    "llama-server": ("/completion", {"prompt": "x"}, lambda answer: answer["content"]),
    "vLLM": ("/generate", {"prompt": "x"}, lambda answer: answer["text"][0]),
    "ollama generate": (
        "/api/generate",
        {"model": "default", "prompt": "x", "raw": True},
        lambda answer: answer["response"],
    ),
    "PaddleNLP": (
        "/v1/chat/completions",
        {"messages": QUESTION, "max_dec_len": 9999},
        lambda answer: answer.get("result") or answer.get("token", ""),
    ),
}
"""Endpoints that return a single text: path, body, and function that reads the text."""


async def check_plain(server: ScriptedServer, name: str) -> None:
    path, body, text_of = PLAIN[name]
    whole = text_of((await server.http.post(path, json=body | {"stream": False})).json())
    chunks = [text_of(line) for line in await lines(server, path, body)]
    assert (chunks[-1] if name == "vLLM" else "".join(chunks)) == whole


THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
DIALECTS: tuple[Callable[[ScriptedServer], Awaitable[tuple[Any, Any]]], ...] = (
    chat,
    messages,
    responses,
    ollama,
    bladellm,
)


@pytest.mark.parametrize("form", FORMATS)
def test_streams_equal_whole_answers(form: str) -> None:
    write, options = FORMATS[form]

    async def check(server: ScriptedServer, parts: list[Part], data: st.DataObject) -> None:
        tokens = server.encode(write(parts))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=12)))
        server.engines.steps = [tokens[a:b] for a, b in itertools.pairwise([0, *cuts, len(tokens)])]
        server.thinking, server.hide_reasoning, server.single_tool_call = (
            form == "hermes",
            data.draw(st.booleans()),
            data.draw(st.booleans()),
        )
        for dialect in DIALECTS:
            whole, streamed = await dialect(server)
            assert streamed == whole, dialect.__name__
            calls = [(part.name, part.text) for part in parts if part.kind == "call"]
            one_call = server.single_tool_call and dialect in (chat, messages, responses)
            assert whole["calls"] == (calls[:1] if one_call else calls)
        for name in PLAIN:
            await check_plain(server, name)

    with asyncio.Runner() as runner:
        manager = scripted_server(**options)
        server = runner.run(manager.__aenter__())
        try:

            @given(answers(form), st.data())
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=[*HealthCheck],
            )
            def check_random_answer(parts: list[Part], data: st.DataObject) -> None:
                runner.run(check(server, parts, data))

            check_random_answer()
        finally:
            runner.run(manager.__aexit__(None, None, None))
