"""OpenAI's Responses API, tested with OpenAI's Python client and compared with chat completions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import anthropic
import httpx
import instructor
import openai
import pydantic
import pytest
from openai.types.responses import Response
from serving import Served, Servers

CAPITAL = "What is the capital of Canada?"
PLAIN: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
GREEDY = {"temperature": 0}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def served(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    """Return the final response of a stream, after checking that the stream's events add up to it."""
    texts: dict[str, str] = {}
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    last = events[-1].response
    for item in last.output:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert texts.get(item.id, "") == text
        assert [event.item for event in events if event.type == "response.output_item.done"].count(item) == 1
    return last


def whole(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(**fields)


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


@pytest.mark.row("responses", "responses.create", "input", "message", "instructions", "max_output_tokens", "stream")
@pytest.mark.row("responses", "temperature", "sequence_number")
@BOTH
def test_response_equals_chat_completion(client: openai.OpenAI, ask: Any) -> None:
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
def test_response_cut_by_max_output_tokens_is_incomplete(client: openai.OpenAI, ask: Any) -> None:
    cut = ask(client, **PLAIN | {"max_output_tokens": 2}, input=CAPITAL)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        2,
    )
    assert cut.output[0].status == "incomplete"


@pytest.mark.row("responses", "function_call", "function_call_output", "tools", "function", "tool_choice")
@BOTH
def test_function_is_called_and_its_output_read(client: openai.OpenAI, ask: Any) -> None:
    question = {"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Paris?"}]}
    forced = {"type": "function", "name": "get_weather"}
    called = ask(client, **PLAIN, input=[question], tools=[WEATHER], tool_choice=forced)
    call = called.output[-1]
    assert (call.type, call.name, list(json.loads(call.arguments))) == ("function_call", "get_weather", ["city"])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [question, *[item.model_dump() for item in called.output], result]
    assert ask(client, **PLAIN, input=history, tools=[WEATHER]).output_text


@pytest.mark.row("responses", "namespace", "web_search")
@BOTH
def test_function_call_has_namespace_and_web_search_is_ignored(client: openai.OpenAI, ask: Any) -> None:
    """Codex sends tool namespaces together with OpenAI's hosted tools, such as web search."""
    question = {"role": "user", "content": "What is the weather in Paris?"}
    tools: Any = [{"type": "namespace", "name": "reports", "tools": [WEATHER]}, {"type": "web_search"}]
    called = ask(client, **PLAIN, input=[question], tools=tools, tool_choice="required")
    call = called.output[-1]
    assert (call.type, call.namespace, call.name) == ("function_call", "reports", "get_weather")
    assert [tool.type for tool in called.tools] == ["namespace"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [question, *[item.model_dump() for item in called.output], result]
    assert ask(client, **PLAIN, input=history, tools=tools).output_text
    raw = client.responses.with_raw_response.create(**PLAIN, input=CAPITAL, tools=tools)
    assert "tools[1].web_search" in raw.headers["x-penstock-ignored"]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].tools\[0\].type: custom is not supported"):
        ask(client, **PLAIN, input=CAPITAL, tools=[{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}])


@pytest.mark.row("responses", "auto", "none", "required", "parallel_tool_calls")
@BOTH
def test_tool_choice_forces_or_forbids_calls(client: openai.OpenAI, ask: Any) -> None:
    def calls(choice: str, **more: Any) -> list[str]:
        response = ask(client, **PLAIN, input=CAPITAL, tools=[WEATHER], tool_choice=choice, **more)
        return [item.name for item in response.output if item.type == "function_call"]

    assert calls("none") == []
    assert calls("required", parallel_tool_calls=False) == ["get_weather"]
    assert calls("required") and set(calls("auto")) <= {"get_weather"}


@pytest.mark.row("responses", "reasoning", "reasoning.effort", "reasoning.summary", "reasoning.generate_summary")
@pytest.mark.row("responses", "chat_template_kwargs")
@BOTH
def test_reasoning_is_an_output_item(client: openai.OpenAI, ask: Any) -> None:
    thinking = ask(client, **PLAIN | {"max_output_tokens": 200}, input=CAPITAL, extra_body=THINK)
    assert [item.type for item in thinking.output] == ["reasoning", "message"]
    assert thinking.usage.output_tokens_details.reasoning_tokens > 0
    history = [{"role": "user", "content": CAPITAL}, *[item.model_dump() for item in thinking.output]]
    assert ask(client, **PLAIN, input=[*history, {"role": "user", "content": "Thanks."}]).output_text
    off = ask(client, **PLAIN, input=CAPITAL, reasoning={"effort": "none"})
    assert [item.type for item in off.output] == ["message"]
    for more in ({"summary": "auto"}, {"generate_summary": "concise"}, {}):
        on = ask(client, **PLAIN, input=CAPITAL, reasoning={"effort": "max", **more})
        assert on.output[0].content[0].text == thinking.output[0].content[0].text


class City(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=20)


@pytest.mark.row("responses", "text.format", "text", "json_schema", "json_object")
@BOTH
def test_text_format_constrains_answer(client: openai.OpenAI, ask: Any) -> None:
    text_config = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    assert list(json.loads(ask(client, **PLAIN, input=CAPITAL, text=text_config).output_text)) == ["city"]
    free = ask(client, **PLAIN, input=CAPITAL, text={"format": {"type": "text"}})
    assert free.output_text == ask(client, **PLAIN, input=CAPITAL).output_text
    json_object = ask(client, **PLAIN, input=CAPITAL, text={"format": {"type": "json_object"}})
    assert json_object.output_text.startswith("{")


@pytest.mark.row("responses", "responses.parse", "responses.stream")
def test_client_helpers_parse_and_stream(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**PLAIN, input=CAPITAL, text_format=City)
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(**PLAIN, input=CAPITAL, text_format=City) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    with client.responses.stream(**PLAIN, input=CAPITAL, tools=[WEATHER], tool_choice="required") as stream:
        (call,) = stream.get_final_response().output
    assert call.parsed_arguments == json.loads(call.arguments)


def test_concurrent_streams_equal_sequential_responses(served: Served, client: openai.OpenAI) -> None:
    questions = [f"What is {number} plus {number}?" for number in range(2, 26)]
    alone = [client.responses.create(**PLAIN, input=question).output_text for question in questions]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as async_client:

            async def ask_one(question: str) -> str:
                async with async_client.responses.stream(**PLAIN, input=question) as stream:
                    return (await stream.get_final_response()).output_text

            return await asyncio.gather(*map(ask_one, questions))

    assert asyncio.run(ask()) == alone


def test_langchain_invokes_streams_and_calls_tools(served: Served, client: openai.OpenAI) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="default", base_url=served.url, api_key="none", temperature=0, max_tokens=60, use_responses_api=True
    )  # type: ignore[call-arg]
    text = client.responses.create(**PLAIN, input=CAPITAL).output_text
    assert model.invoke(CAPITAL).text == "".join(chunk.text for chunk in model.stream(CAPITAL)) == text
    assert isinstance(model.with_structured_output(City).invoke(CAPITAL), City)
    question = HumanMessage("What is the weather in Paris?")
    called = model.bind_tools([WEATHER], tool_choice="any").invoke([question])
    (call,) = called.tool_calls
    assert (call["name"], list(call["args"])) == ("get_weather", ["city"])
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert model.bind_tools([WEATHER]).invoke([question, called, result]).text


@pytest.mark.row("responses", "responses.input_tokens.count")
def test_input_tokens_count_equals_usage(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "default", "input": CAPITAL, "instructions": "Be short.", "tools": [WEATHER]}
    used = client.responses.create(**PLAIN | fields).usage
    assert used is not None
    assert client.responses.input_tokens.count(**fields).input_tokens == used.input_tokens
    with pytest.raises(openai.BadRequestError, match=r"previous_response_id.*keeps no state"):
        client.responses.input_tokens.count(**fields, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(**fields | {"model": "nobody"})


@pytest.mark.row("responses", "responses.retrieve", "cancel", "delete", "input_items")
@pytest.mark.row("responses", "responses.compact")
def test_responses_are_not_stored_without_storage_dir(client: openai.OpenAI) -> None:
    response = client.responses.create(**PLAIN, input=CAPITAL)
    for ask in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.cancel(response.id),
        lambda: client.responses.delete(response.id),
        lambda: client.responses.input_items.list(response.id),
        lambda: client.responses.compact(model="default", input=CAPITAL),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


@pytest.mark.row("responses", "metadata", "user", "service_tier", "auto", "default")
@pytest.mark.row("responses", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream_options")
@pytest.mark.row("responses", 'include: ["reasoning.encrypted_content"]')
@BOTH
def test_neutral_fields_do_not_change_answer(client: openai.OpenAI, ask: Any) -> None:
    returned: dict[str, Any] = {"metadata": {"a": "b"}, "user": "me", "service_tier": "default"}
    other: dict[str, Any] = {
        "max_tool_calls": 3, "prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "b",
        "include": ["reasoning.encrypted_content"], "store": False, "background": False, "truncation": "disabled",
        "top_logprobs": 0,
    }  # fmt: skip
    if ask is streamed:
        other["stream_options"] = {"include_obfuscation": False}
    response = ask(client, **PLAIN, input=CAPITAL, **returned, **other)
    assert response.output_text == ask(client, **PLAIN, input=CAPITAL).output_text
    assert {name: getattr(response, name) for name in returned} == returned


@pytest.mark.row("responses", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "cache_salt", "priority")
@BOTH
def test_sampling_fields_equal_chat_completion(client: openai.OpenAI, ask: Any) -> None:
    sampling = {
        "temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 4, "stop": ["zebra"], "ignore_eos": True,
        "cache_salt": "s", "priority": 1,
    }  # fmt: skip
    story = "Tell me a story about a fox."
    response = ask(client, model="default", max_output_tokens=30, input=story, extra_body=sampling)
    messages: Any = [{"role": "user", "content": story}]
    chat = client.chat.completions.create(model="default", max_tokens=30, messages=messages, extra_body=sampling)
    assert response.output_text == chat.choices[0].message.content
    assert response.output_text != ask(client, **PLAIN | {"max_output_tokens": 30}, input=story).output_text
    stopped = ask(client, **PLAIN, input=CAPITAL, extra_body={"stop": ["Ottawa"]})
    assert stopped.status == "completed" and "Ottawa" not in stopped.output_text


@pytest.mark.row("responses", "previous_response_id", "store", "background")
@pytest.mark.row("responses", "prompt")
@pytest.mark.row("responses", "truncation: auto", "context_management", "moderation")
@pytest.mark.row("responses", "top_logprobs", "include", "text.verbosity", "errors")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id.*keeps no state"),
        ({"conversation": "conv_1"}, "conversation: the server keeps no state"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: the server stores no prompts"),
        ({"store": True}, "store.*send false"),
        ({"background": True}, "background.*send false"),
        ({"truncation": "auto"}, "truncation.*send disabled"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"top_logprobs": 2}, "top_logprobs.*not supported yet"),
        ({"include": ["message.output_text.logprobs"]}, "message.output_text.logprobs"),
        (
            {"input": "a " * 4000},
            "maximum context length is 2048 tokens.*your input resulted in .*context_length_exceeded",
        ),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, r"input\[0\].role.*king"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"type": "file_search_call"}]}, "file_search_call"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        (
            {"tools": [{"type": "mcp", "server_label": "a", "server_url": "https://example.com"}]},
            "start .*--mcp-config",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}}},
            r"text\.format: .*uniqueItems",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_or_unsupported_field_is_rejected_by_name(
    client: openai.OpenAI, fields: dict[str, Any], message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**PLAIN | {"input": CAPITAL} | fields, stream=stream)


def test_refusal_in_history_equals_output_text(client: openai.OpenAI) -> None:
    refusal: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    output_text: Any = {"role": "assistant", "content": [{"type": "output_text", "text": "No."}]}
    question: Any = {"role": "user", "content": CAPITAL}
    texts = [
        client.responses.create(**PLAIN, input=[question, item, question]).output_text
        for item in (refusal, output_text)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.row("responses", "errors")
def test_dead_engine_ends_stream_with_error_without_resume() -> None:
    with Served("--num-gpu-blocks-override", "80", "--no-resume") as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
        endless = {"model": "default", "input": CAPITAL, "ignore_eos": True, "stream": True}
        stream = client.responses.create(model="default", input=CAPITAL, stream=True, extra_body={"ignore_eos": True})
        assert next(stream).type == "response.created"
        with httpx.stream("POST", f"{served.url}/responses", json=endless, timeout=60) as raw:
            lines = raw.iter_lines()
            first = next(lines)
            os.kill(served.pids["engine"][0], signal.SIGKILL)
            events = [json.loads(line[6:]) for line in (first, *lines) if line.startswith("data: ")]
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "service_unavailable_error")


class Place(pydantic.BaseModel):
    city: str


class Anything(pydantic.BaseModel):
    """Model that accepts any JSON object, because ``json_object`` enforces no schema."""

    city: str = ""


@pytest.mark.row("responses", "tool_choice", "text.format")
@pytest.mark.parametrize(
    ("mode", "response_model"),
    [
        ("TOOLS", Place),
        ("TOOLS_STRICT", Place),
        ("JSON", Anything),
        ("JSON_SCHEMA", Place),
        ("RESPONSES_TOOLS", Place),
        ("RESPONSES_TOOLS_WITH_INBUILT_TOOLS", Place),
    ],
)
def test_instructor_modes_return_model(
    client: openai.OpenAI, mode: str, response_model: type[pydantic.BaseModel]
) -> None:
    """instructor is unmodified. Its Responses modes send both a tool and a text format."""
    instructor_client = instructor.from_openai(client, mode=instructor.Mode[mode])
    messages: Any = [{"role": "user", "content": CAPITAL}]
    answer = instructor_client.chat.completions.create(
        model="default", messages=messages, response_model=response_model, max_retries=0, temperature=0
    )
    assert isinstance(answer, response_model)


@pytest.mark.parametrize("mode", ["ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS"])
def test_instructor_anthropic_modes_return_model(served: Served, mode: str) -> None:
    plain = anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0)
    instructor_client = instructor.from_anthropic(plain, mode=instructor.Mode[mode])
    messages: Any = [{"role": "user", "content": CAPITAL}]
    answer = instructor_client.messages.create(
        model="default", messages=messages, response_model=Place, max_retries=0, max_tokens=60, extra_body=GREEDY
    )
    assert isinstance(answer, Place)
