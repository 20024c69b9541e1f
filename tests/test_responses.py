"""OpenAI's Responses, as OpenAI's own client speaks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response
from serving import Served

CAPITAL = "What is the capital of Canada?"
PLAIN: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Served("--num-gpu-blocks-override", "200") as served:
        yield openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    """The last one told, after events that say the same piece by piece."""
    texts: dict[str, str] = {}
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    last = events[-1].response
    for item in last.output:
        told = item.arguments if item.type == "function_call" else item.content[0].text
        assert texts.get(item.id, "") == told
        assert [event.item for event in events if event.type == "response.output_item.done"].count(item) == 1
    return last


def whole(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(**fields)


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


@BOTH
def test_a_response_is_answered_as_a_chat_is(client: openai.OpenAI, ask: Any) -> None:
    response = ask(client, **PLAIN, instructions="You are a pirate.", input=CAPITAL)
    messages: Any = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": CAPITAL}]
    chat = client.chat.completions.create(model="default", temperature=0, max_tokens=60, messages=messages)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object, response.store) == ("completed", "response", False)
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )


@BOTH
def test_what_is_cut_is_incomplete(client: openai.OpenAI, ask: Any) -> None:
    cut = ask(client, **PLAIN | {"max_output_tokens": 2}, input=CAPITAL)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        2,
    )
    assert cut.output[0].status == "incomplete"


@BOTH
def test_tools_are_called_and_what_came_of_it_read(client: openai.OpenAI, ask: Any) -> None:
    question = {"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Paris?"}]}
    named = {"type": "function", "name": "get_weather"}
    called = ask(client, **PLAIN, input=[question], tools=[WEATHER], tool_choice=named)
    call = called.output[-1]
    assert (call.type, call.name, list(json.loads(call.arguments))) == ("function_call", "get_weather", ["city"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    back = [question, *[item.model_dump() for item in called.output], result]
    assert ask(client, **PLAIN, input=back, tools=[WEATHER]).output_text


@BOTH
def test_thoughts_are_items(client: openai.OpenAI, ask: Any) -> None:
    thought = ask(client, **PLAIN | {"max_output_tokens": 200}, input=CAPITAL, extra_body=THINK)
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert thought.usage.output_tokens_details.reasoning_tokens > 0
    back = [{"role": "user", "content": CAPITAL}, *[item.model_dump() for item in thought.output]]
    assert ask(client, **PLAIN, input=[*back, {"role": "user", "content": "Thanks."}]).output_text
    off = ask(client, **PLAIN, input=CAPITAL, reasoning={"effort": "none"})
    assert [item.type for item in off.output] == ["message"]


class City(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=20)


@BOTH
def test_an_answer_keeps_to_a_schema(client: openai.OpenAI, ask: Any) -> None:
    wanted = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    assert list(json.loads(ask(client, **PLAIN, input=CAPITAL, text=wanted).output_text)) == ["city"]
    parsed = client.responses.parse(**PLAIN, input=CAPITAL, text_format=City)
    assert isinstance(parsed.output_parsed, City)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id.*nothing is kept"),
        ({"store": True}, "store"),
        ({"input": [{"role": "king", "content": "x"}]}, r"input\[0\].role.*king"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"type": "file_search_call"}]}, "file_search_call"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens.*did you mean"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}}}, "uniqueItems"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], named: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        client.responses.create(**PLAIN | {"input": CAPITAL} | fields, stream=stream)
