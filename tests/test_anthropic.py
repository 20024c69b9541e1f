"""Anthropic's dialect, as its own client speaks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
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
"""The client has no name for a temperature any more."""


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


def test_a_message_is_answered_as_openais_is(served: Served, client: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "You are a pirate."}]
    whole = client.messages.create(**PLAIN, system=system, messages=CAPITAL)
    told = streamed(client, **PLAIN, system=system, messages=CAPITAL)
    other = openai.OpenAI(base_url=served.url, api_key="secret").chat.completions.create(
        **BODY, **GREEDY, messages=[{"role": "system", "content": "You are a pirate."}, *CAPITAL]
    )
    assert whole.content[0].text == told.content[0].text == other.choices[0].message.content
    assert (whole.stop_reason, whole.role, whole.type) == ("end_turn", "assistant", "message")
    assert other.usage is not None
    for usage in (whole.usage, told.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == other.usage.prompt_tokens
        assert usage.output_tokens == other.usage.completion_tokens
    count = client.messages.count_tokens(model="default", system=system, messages=CAPITAL)
    assert count.input_tokens == other.usage.prompt_tokens


@pytest.mark.parametrize("ask", [lambda client, **fields: client.messages.create(**fields), streamed])
def test_why_a_message_ends(client: anthropic.Anthropic, ask: Any) -> None:
    stopped = ask(client, **PLAIN, messages=CAPITAL, stop_sequences=["Canada"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Canada")
    assert "Canada" not in stopped.content[0].text
    cut = ask(client, **PLAIN | {"max_tokens": 2}, messages=CAPITAL)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


@pytest.mark.parametrize("ask", [lambda client, **fields: client.messages.create(**fields), streamed])
def test_tools_are_used_and_their_results_read(client: anthropic.Anthropic, ask: Any) -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced = {"type": "tool", "name": "get_weather"}
    message = ask(client, **PLAIN, messages=asked, tools=[WEATHER], tool_choice=forced)
    used = message.content[-1]
    assert (message.stop_reason, used.type, used.name) == ("tool_use", "tool_use", "get_weather")
    assert list(used.input) == ["city"]
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "sunny"}]}
    answers = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = ask(client, **PLAIN, messages=[*asked, *answers], tools=[WEATHER])
    assert after.content[0].text
    none = ask(client, **PLAIN, messages=asked, tools=[WEATHER], tool_choice={"type": "none"})
    assert all(block.type == "text" for block in none.content)


@pytest.mark.parametrize("ask", [lambda client, **fields: client.messages.create(**fields), streamed])
def test_thoughts_come_where_they_are_asked_for(client: anthropic.Anthropic, ask: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    thought = ask(client, **PLAIN, messages=CAPITAL, thinking=thinking)
    assert [block.type for block in thought.content] == ["thinking", "text"]
    back = [*CAPITAL, {"role": "assistant", "content": thought.content}, {"role": "user", "content": "Thanks."}]
    assert ask(client, **PLAIN, messages=back).content[0].type == "text"
    assert [block.type for block in ask(client, **PLAIN, messages=CAPITAL).content] == ["text"]


@pytest.mark.parametrize("ask", [lambda client, **fields: client.messages.create(**fields), streamed])
def test_an_answer_keeps_to_a_schema(client: anthropic.Anthropic, ask: Any) -> None:
    schema = WEATHER["input_schema"]
    wanted = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    assert list(json.loads(ask(client, **PLAIN, messages=CAPITAL, output_config=wanted).content[0].text)) == ["city"]


def test_an_answer_goes_on_with_the_last_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**PLAIN, messages=CAPITAL).content[0].text
    begun = {"role": "assistant", "content": whole[:11]}
    assert client.messages.create(**PLAIN, messages=[*CAPITAL, begun]).content[0].text == whole[11:]


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        ({"max_token": 5}, anthropic.BadRequestError, "max_token.*did you mean max_tokens"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"model": "nothing"}, anthropic.NotFoundError, "nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "image"),
        ({"thinking": {"type": "enabled", "budget_tokens": 60}}, anthropic.BadRequestError, "budget_tokens"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "fly"}}, anthropic.BadRequestError, "fly"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_by_name(
    client: anthropic.Anthropic, fields: dict[str, Any], kind: type[anthropic.APIStatusError], named: str, stream: bool
) -> None:
    body = {**BODY, **GREEDY, "messages": CAPITAL, "stream": stream, **fields}
    with pytest.raises(kind, match=named) as caught:
        client.post("/v1/messages", body=body, cast_to=dict[str, Any])
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["message"]  # type: ignore[index]


def test_a_key_is_asked_for_in_its_own_shape(served: Served) -> None:
    stranger = anthropic.Anthropic(base_url=served.root, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(**PLAIN, messages=CAPITAL)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_events_come_in_their_order(served: Served) -> None:
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
