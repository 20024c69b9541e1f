"""Anthropic's Messages API, tested with Anthropic's Python client and compared with OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pydantic
import pytest
from serving import Served

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CAPITAL = [{"role": "user", "content": "What is the capital of Canada?"}]
GREEDY = {"temperature": 0}
BODY: dict[str, Any] = {"model": "default", "max_tokens": 60}
PLAIN = BODY | {"extra_body": GREEDY}
"""The temperature is in ``extra_body`` because the client no longer has an argument for it."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "200", "--api-key", "secret") as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.root, api_key="secret", max_retries=0)


def streamed(client: anthropic.Anthropic, **fields: Any) -> Any:
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


def whole(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**fields)


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


@pytest.mark.row("anthropic", "messages.create", "messages.stream", "messages.count_tokens", "base_url", "system")
@pytest.mark.row("anthropic", "text", "max_tokens", "temperature", "stream", "usage")
def test_message_text_and_usage_equal_openai_chat(served: Served, client: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "You are a pirate."}]
    message = client.messages.create(**PLAIN, system=system, messages=CAPITAL)
    stream = streamed(client, **PLAIN, system=system, messages=CAPITAL)
    other = openai.OpenAI(base_url=served.url, api_key="secret").chat.completions.create(
        **BODY, **GREEDY, messages=[{"role": "system", "content": "You are a pirate."}, *CAPITAL]
    )
    assert message.content[0].text == stream.content[0].text == other.choices[0].message.content
    assert (message.stop_reason, message.role, message.type) == ("end_turn", "assistant", "message")
    assert other.usage is not None
    for usage in (message.usage, stream.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == other.usage.prompt_tokens
        assert usage.output_tokens == other.usage.completion_tokens
    count = client.messages.count_tokens(model="default", system=system, messages=CAPITAL)
    assert count.input_tokens == other.usage.prompt_tokens
    system_message: Any = [{"role": "system", "content": system}, *CAPITAL]
    assert client.messages.create(**PLAIN, messages=system_message).content[0].text == message.content[0].text


@pytest.mark.row("anthropic", "stop_sequences", "stop_reason", "max_tokens")
@BOTH
def test_stop_reason_names_cause_of_end(client: anthropic.Anthropic, ask: Any) -> None:
    stopped = ask(client, **PLAIN, messages=CAPITAL, stop_sequences=["Canada"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Canada")
    assert "Canada" not in stopped.content[0].text
    cut = ask(client, **PLAIN | {"max_tokens": 2}, messages=CAPITAL)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    beyond = ask(client, **PLAIN | {"max_tokens": 20_000}, messages=CAPITAL)
    assert (beyond.stop_reason, beyond.stop_sequence) == ("end_turn", None)
    empty = client.messages.count_tokens(model="default", messages=[{"role": "user", "content": ""}]).input_tokens
    nearly: list[Any] = [{"role": "user", "content": "a " * (2046 - empty)}]
    full = ask(client, **PLAIN, messages=nearly)
    assert full.stop_reason == "model_context_window_exceeded" and full.usage.output_tokens < PLAIN["max_tokens"]


@pytest.mark.row("anthropic", "tool_use", "tool_result", "tools", "tool_choice", "auto", "any", "tool", "none")
@pytest.mark.row("anthropic", "disable_parallel_tool_use")
@BOTH
def test_tool_choice_forces_or_forbids_tool_use(client: anthropic.Anthropic, ask: Any) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced = {"type": "tool", "name": "get_weather"}
    message = ask(client, **PLAIN, messages=question, tools=[WEATHER], tool_choice=forced)
    used = message.content[-1]
    assert (message.stop_reason, used.type, used.name) == ("tool_use", "tool_use", "get_weather")
    assert list(used.input) == ["city"] and used.id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "sunny"}]}
    answers = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = ask(client, **PLAIN, messages=[*question, *answers], tools=[WEATHER])
    assert after.content[0].text
    none = ask(client, **PLAIN, messages=question, tools=[WEATHER], tool_choice={"type": "none"})
    assert all(block.type == "text" for block in none.content)
    single = {"type": "any", "disable_parallel_tool_use": True}
    (called,) = ask(client, **PLAIN, messages=question, tools=[WEATHER | {"strict": True}], tool_choice=single).content
    assert (called.type, list(called.input)) == ("tool_use", ["city"])
    free = ask(client, **PLAIN, messages=question, tools=[WEATHER], tool_choice={"type": "auto"})
    assert free.stop_reason in ("end_turn", "tool_use")


@pytest.mark.row("anthropic", "beta.messages.tool_runner", "thread")
@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_calls_tool_and_gets_final_answer(client: anthropic.Anthropic, stream: bool) -> None:
    """The server refuses the runner's request to keep the conversation, so the runner sends all messages each time."""
    seen = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Return the weather in a city."""
        seen.append(city)
        return "sunny, 21 degrees"

    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    runner = client.beta.messages.tool_runner(**PLAIN, messages=question, tools=[get_weather], stream=stream)
    messages: Any = [turn.get_final_message() for turn in runner] if stream else list(runner)
    assert seen == ["Paris"] and len(messages) == 2
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert "21" in messages[1].content[0].text
    with pytest.raises(anthropic.BadRequestError, match="the server keeps no state between requests") as refused:
        client.beta.messages.create(**PLAIN, messages=question, thread={"type": "create"})
    assert refused.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"


@pytest.mark.row("anthropic", "thinking", "enabled", "budget_tokens", "adaptive", "disabled")
@pytest.mark.row("anthropic", "signature", "redacted_thinking", "usage")
@BOTH
def test_thinking_blocks_follow_thinking_config(client: anthropic.Anthropic, ask: Any) -> None:
    def kinds(thinking: Any) -> list[str]:
        more = {"thinking": thinking} if thinking else {}
        return [block.type for block in ask(client, **PLAIN, messages=CAPITAL, **more).content]

    thought = ask(client, **PLAIN, messages=CAPITAL, thinking={"type": "enabled", "budget_tokens": 20})
    assert [block.type for block in thought.content] == ["thinking", "text"]
    assert thought.content[0].signature == "" and 0 < thought.usage.output_tokens_details.thinking_tokens <= 20
    cut = ask(client, **PLAIN, messages=CAPITAL, thinking={"type": "enabled", "budget_tokens": 4})
    assert len(cut.content[0].thinking) < len(thought.content[0].thinking)
    assert kinds({"type": "adaptive"}) == ["thinking", "text"]
    for without in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        assert kinds(without) == ["text"]
    blocks = [block.model_dump() for block in thought.content]
    for before in (blocks, [REDACTED, *blocks]):
        back = [*CAPITAL, {"role": "assistant", "content": before}, {"role": "user", "content": "Thanks."}]
        assert ask(client, **PLAIN, messages=back).content[0].type == "text"


class City(pydantic.BaseModel, extra="forbid"):
    name: Literal["Ottawa", "Toronto"]


@pytest.mark.row("anthropic", "messages.parse", "output_config.format", "output_config.effort")
@BOTH
def test_output_format_constrains_answer_to_schema(client: anthropic.Anthropic, ask: Any) -> None:
    schema = WEATHER["input_schema"]
    output_config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    assert list(json.loads(ask(client, **PLAIN, messages=CAPITAL, output_config=output_config).content[0].text)) == [
        "city"
    ]
    parsed = client.messages.parse(**PLAIN, messages=CAPITAL, output_format=City).parsed_output
    assert isinstance(parsed, City)
    with client.messages.stream(**PLAIN, messages=CAPITAL, output_format=City) as stream:
        assert stream.get_final_message().parsed_output == parsed


@pytest.mark.row("anthropic", "cache_control", "metadata", "service_tier", "auto", "standard_only", "beta.messages")
@pytest.mark.row("anthropic", "top_p", "top_k")
@BOTH
def test_neutral_fields_do_not_change_answer(client: anthropic.Anthropic, ask: Any) -> None:
    plain = ask(client, **PLAIN, messages=CAPITAL).content[0].text
    edits = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    more: dict[str, Any] = {
        "cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "me"}, "service_tier": "standard_only",
        "extra_body": GREEDY | {"top_p": 0.9, "top_k": 5, "container": None, "mcp_servers": []} | edits,
        "system": [], "stop_sequences": [],
    }  # fmt: skip
    assert ask(client, **BODY, **more, messages=CAPITAL).content[0].text == plain
    beta = client.beta.messages.create(**PLAIN, messages=CAPITAL, betas=["some-beta"])  # type: ignore[arg-type]
    assert beta.content[0].text == plain  # type: ignore[union-attr]

    def after(**result: Any) -> str:
        used = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Paris"}}
        results = [{"type": "tool_result", "tool_use_id": "1", "content": "no such city", **result}]
        turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": results}]
        return str(ask(client, **PLAIN, messages=[*CAPITAL, *turns], tools=[WEATHER]).content[0].text)

    assert after(is_error=True) == after()


@pytest.mark.row("anthropic", "top_p", "top_k", "temperature")
def test_top_k_1_and_tiny_top_p_equal_greedy(served: Served, client: anthropic.Anthropic) -> None:
    texts = {
        client.messages.create(**BODY, messages=CAPITAL, extra_body=sampling).content[0].text
        for sampling in (GREEDY, {"temperature": 2.0, "top_k": 1}, {"temperature": 1.5, "top_p": 1e-6})
    }
    assert len(texts) == 1


def test_24_concurrent_async_streams_return_same_text(served: Served, client: anthropic.Anthropic) -> None:
    expected = client.messages.create(**PLAIN, messages=CAPITAL).content[0].text

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=served.root, api_key="secret", max_retries=0) as async_client:

            async def answer() -> str:
                async with async_client.messages.stream(**PLAIN, messages=CAPITAL) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(answer() for _ in range(24)))

    assert asyncio.run(ask()) == [expected] * 24


@pytest.mark.row("anthropic", "models.list", "models.retrieve", "messages.batches", "beta.files")
def test_models_are_listed_and_missing_endpoints_return_404(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("penstock-demo", "penstock-demo", "model")
    assert model.max_input_tokens == 2048 and model.created_at.tzinfo
    assert client.models.retrieve("penstock-demo") == model == client.models.retrieve("default")
    page = client.models.list(limit=1)
    assert (page.first_id, page.last_id, page.has_more) == (model.id, model.id, False)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.models.retrieve("claude")
    with pytest.raises(anthropic.BadRequestError, match="after_id"):
        client.models.list(after_id="claude")
    for ask in (lambda: client.messages.batches.list(), lambda: client.beta.files.list()):
        with pytest.raises(anthropic.NotFoundError):
            ask()


@pytest.mark.row("anthropic", "a last message of the assistant")
def test_answer_continues_last_assistant_message(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**PLAIN, messages=CAPITAL).content[0].text
    for prefill in (text[:11], [{"type": "text", "text": text[:11]}]):
        last = {"role": "assistant", "content": prefill}
        assert client.messages.create(**PLAIN, messages=[*CAPITAL, last]).content[0].text == text[11:]


def user_message(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


REDACTED = {"type": "redacted_thinking", "data": "x"}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "get_weather", "input": {}}]}


@pytest.mark.row("anthropic", "container", "mcp_servers", "context_management")
@pytest.mark.row("anthropic", '{"type": "error", "error": {"type", "message"}}')
@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"model": "nothing"}, anthropic.NotFoundError, "nothing"),
        ({"messages": user_message({"type": "image"})}, anthropic.BadRequestError, "image"),
        ({"messages": user_message({"type": "document"})}, anthropic.BadRequestError, "document"),
        ({"messages": user_message()}, anthropic.BadRequestError, r"messages\[0\].content"),
        ({"messages": user_message({"type": "tool_result"})}, anthropic.BadRequestError, "tool_use_id: is missing"),
        ({"messages": [{"role": "king", "content": "x"}]}, anthropic.BadRequestError, "king"),
        ({"messages": [*CAPITAL, USED]}, anthropic.BadRequestError, r"messages\[2\]: is missing: each tool_use"),
        (
            {"messages": [{"role": "user", "content": "a " * 4000}]},
            anthropic.BadRequestError,
            r"prompt is too long: \d+ tokens > 2048 maximum",
        ),
        (
            {"messages": [{"role": "assistant", "content": [REDACTED]}]},
            anthropic.BadRequestError,
            "messages: must have",
        ),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        ({"stop_sequences": ["x"] * 999}, anthropic.BadRequestError, "stop_sequences: must have"),
        ({"container": "c"}, anthropic.BadRequestError, "container: the server does not execute code"),
        ({"mcp_servers": [{"type": "url"}]}, anthropic.BadRequestError, "mcp_servers: the server does not call tools"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            anthropic.BadRequestError,
            r"context_management.edits\[0\].type: .*clear_tool_uses_20250919",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "x"}]},
            anthropic.BadRequestError,
            "web_search_20250305 is",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "x"}]}, anthropic.BadRequestError, "bash_20250124 is"),
        ({"tools": [{"name": "x"}]}, anthropic.BadRequestError, r"tools\[0\].input_schema: is missing"),
        ({"temperature": -1}, anthropic.BadRequestError, "temperature"),
        ({"thinking": {"type": "enabled"}}, anthropic.BadRequestError, "budget_tokens: is missing"),
        ({"messages": [{"role": "user", "content": "x" * 2**21}]}, anthropic.RequestTooLargeError, "body: must have"),
        ({"thinking": {"type": "enabled", "budget_tokens": 60}}, anthropic.BadRequestError, "budget_tokens"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "fly"}}, anthropic.BadRequestError, "fly"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_field_is_rejected_by_name(
    client: anthropic.Anthropic,
    fields: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    message: str,
    stream: bool,
) -> None:
    body = {**BODY, **GREEDY, "messages": CAPITAL, "stream": stream, **fields}
    with pytest.raises(kind, match=message) as caught:
        client.post("/v1/messages", body=body, cast_to=dict[str, Any])
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["message"]  # type: ignore[index]


@pytest.mark.row("anthropic", "x-api-key")
def test_wrong_key_gets_authentication_error(served: Served) -> None:
    stranger = anthropic.Anthropic(base_url=served.root, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(**PLAIN, messages=CAPITAL)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest.mark.row("anthropic", "events of a stream")
def test_stream_events_follow_documented_order(served: Served) -> None:
    body = {**BODY, **GREEDY, "messages": CAPITAL, "stream": True}
    with httpx.stream("POST", f"{served.root}/v1/messages", json=body, headers={"x-api-key": "secret"}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    kinds = [line.removeprefix("event: ") for line in lines[::2]]
    assert kinds == [json.loads(line.removeprefix("data: "))["type"] for line in lines[1::2]]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.row("anthropic", '{"type": "error", "error": {"type", "message"}}')
def test_full_queue_and_dead_engine_are_reported_as_errors() -> None:
    flags = ("--num-gpu-blocks-override", "40", "--max-num-seqs", "1", "--max-waiting", "0", "--no-resume")
    with Served(*flags) as served:
        client = anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0)
        endless = BODY | {"max_tokens": 1500, "messages": [{"role": "user", "content": "Tell me a long story."}]}
        refused = False
        while not refused:  # on a busy machine, the story may end before the next request arrives
            with client.messages.stream(**endless, extra_body={"stop_sequences": None, "ignore_eos": True}) as stream:
                next(iter(stream))
                try:
                    client.messages.create(**PLAIN, messages=CAPITAL)
                except anthropic.RateLimitError as error:
                    refused = True
                    assert "waiting" in str(error)
                    os.kill(served.pids["engine"][0], signal.SIGKILL)
                    with pytest.raises(anthropic.APIStatusError, match="the engine died"):
                        stream.until_done()
