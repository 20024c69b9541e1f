"""``penstock serve`` with common clients (OpenAI, LiteLLM, LangChain), plain HTTP and raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from serving import SERVE, Served, Servers, usage_error

from penstock import LLM, SamplingParams, demo

BLOCKS = ("--num-gpu-blocks-override", "400")
MODEL = "penstock-demo"
OTTAWA = [{"role": "user", "content": "What is the capital of Canada?"}]
STORY = [{"role": "user", "content": "Tell me a story."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
IN_PARIS = [{"role": "user", "content": "巴黎的天气怎么样？"}]


@pytest.fixture(scope="module")
def server(servers: Servers) -> Served:
    return servers.get(*BLOCKS)


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """Server with API keys, small limits, a JSON log, and ``--strict-requests``."""
    limits = ("--max-body-size", "20000", "--max-header-size", "4000", "--client-timeout", "1")
    keys = ("--api-key", "one,three", "--api-key", "two", "--allowed-origins", "https://a.example")
    with Served(*BLOCKS, *limits, *keys, "--log-format", "json", "--strict-requests") as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def plain(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.root, timeout=60) as http_client:
        yield http_client


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=400)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object of a response, after checking the response's status and the object's keys."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# --- Common clients ------------------------------------------------------------------------------------------------


def test_openai_chat_returns_answer_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0)
    assert answer.choices[0].message.content == "The capital of Canada is Ottawa."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_openai_streamed_chat_returns_answer_and_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=OTTAWA, temperature=0, stream=True, stream_options=options
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of Canada is Ottawa."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert last.choices == []
    complete = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0)
    assert last.usage and complete.usage
    assert last.usage.completion_tokens == complete.usage.completion_tokens


@pytest.mark.parametrize("forced", [False, True])
def test_openai_stream_helper_collects_tool_call(client: openai.OpenAI, forced: bool) -> None:
    """A fully forced call arrives in the last chunk, because the model generates no token."""
    without_arguments: Any = {
        "type": "function",
        "function": {"name": "wait", "parameters": {"additionalProperties": False}},
    }
    fields: dict[str, Any] = (
        {"tools": [without_arguments], "tool_choice": "required"} if forced else {"tools": [WEATHER]}
    )
    fields["parallel_tool_calls"] = False
    with client.chat.completions.stream(model=MODEL, messages=IN_PARIS, temperature=0, **fields) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == ({} if forced else {"city": "巴黎"})
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_openai_completions_return_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One", "两"], n=2, seed=1, temperature=1, max_tokens=5, logprobs=2, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:1] for choice in answer.choices] == ["O", "O", "两", "两"]
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs[0] is None, "the first token must not have a logprob"
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(token)


def test_openai_chat_returns_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=OTTAWA, temperature=0, logprobs=True, top_logprobs=3, max_tokens=6
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 6
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy sampling must take the most likely token"
        assert bytes(token.bytes or []).decode() == token.token


def test_openai_chat_ends_before_stop_string(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0, stop=["Ott", "of C"])
    assert answer.choices[0].message.content == "The capital "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].to_dict()["stop_reason"] == "of C"


def test_vllm_fields_in_extra_body_take_effect(client: openai.OpenAI) -> None:
    """The fields are passed in ``extra_body``."""
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 3}
    extra |= {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True, "cache_salt": "mine"}
    answer = client.chat.completions.create(model=MODEL, messages=OTTAWA, max_tokens=20, seed=1, extra_body=extra)
    assert answer.choices[0].message.to_dict()["reasoning_content"]
    assert answer.usage and answer.usage.completion_tokens == 20
    assert len(answer.choices[0].to_dict()["token_ids"]) == 20  # type: ignore[arg-type]


def test_openai_tool_is_called_and_result_is_read(client: openai.OpenAI) -> None:
    messages: list[Any] = [*IN_PARIS]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, tools=[WEATHER])
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "巴黎"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21, "sky": "晴天"}'}
    messages += [first.choices[0].message, result]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, tools=[WEATHER])
    assert "21" in (answer.choices[0].message.content or "")
    text = client.chat.completions.create(
        model=MODEL, messages=IN_PARIS, temperature=0, tools=[WEATHER], tool_choice="none"
    )
    assert text.choices[0].message.tool_calls is None


def test_openai_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError, match="available: penstock-demo"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="other", prompt="?")
    assert refused.value.code == "model_not_found"
    assert client.completions.create(model="default", prompt="?", max_tokens=1).model == MODEL


def test_openai_concurrent_requests_get_equal_answers(server: Served) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                chunks = await client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            async def complete() -> str:
                answer = await client.completions.create(model=MODEL, prompt="The sea", temperature=0, max_tokens=8)
                return answer.choices[0].text

            answers = await asyncio.gather(*[streamed() for _ in range(8)], *[complete() for _ in range(8)])
            assert set(answers[:8]) == {"The capital of Canada is Ottawa."}
            assert len(set(answers[8:])) == 1

    asyncio.run(asyncio.wait_for(ask(), 60))


@pytest.mark.slow
def test_litellm_chats_and_streams(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": server.url, "api_key": "none", "temperature": 0}
    answer = litellm.completion(messages=OTTAWA, **options)
    assert answer.choices[0].message.content == "The capital of Canada is Ottawa."
    chunks = litellm.completion(messages=OTTAWA, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of Canada is Ottawa."
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=OTTAWA, top_p=2, **options)


def test_litellm_tool_is_called_and_result_is_read(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of LiteLLM's documentation sends LiteLLM's message back, including its additional fields."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": server.url, "api_key": "none", "temperature": 0}
    messages: list[Any] = list(IN_PARIS)
    first = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="auto", **options)
    message = first.choices[0].message
    message.provider_specific_fields = {"refusal": None}
    messages.append(message)
    for call in message.tool_calls:
        answer = {"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": "22 °C"}
        messages.append(answer)
    second = litellm.completion(messages=messages, **options)
    assert message.tool_calls and second.choices[0].message.content


@pytest.mark.slow
def test_langchain_fields_for_other_models_are_accepted(server: Served) -> None:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_openai import ChatOpenAI

    extra = {"metadata": {"session": 5}, "num_ctx": 4096, "options": {"num_gpu": 1}}
    chat = ChatOpenAI(
        model=MODEL,
        base_url=server.url,
        api_key="none",
        verbosity="low",
        reasoning_effort="low",
        extra_body=extra,  # type: ignore[arg-type]
    )
    parts: list[Any] = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    messages = [HumanMessage(parts), AIMessage("Hello", id="a", name="b"), HumanMessage("Who are you?")]
    assert chat.invoke(messages).content
    assert "".join(str(chunk.content) for chunk in chat.stream(messages))


def test_langchain_chats_and_streams(server: Served) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=server.url, api_key="none", temperature=0, stream_usage=True)  # type: ignore[arg-type]
    answer = chat.invoke("What is the capital of Canada?")
    assert answer.content == "The capital of Canada is Ottawa."
    assert answer.usage_metadata
    chunks = list(chat.stream("What is the capital of Canada?"))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
        == (answer.usage_metadata["output_tokens"])
    )
    (call,) = chat.bind_tools([WEATHER]).invoke("巴黎的天气怎么样？").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "巴黎"})


# --- Equal to LLM, with and without streaming -----------------------------------------------------------------------


GREEDY = {"temperature": 0, "top_p": 1, "top_k": 0}
SAMPLED = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 7, "n": 3}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_answers_equal_llm_bitwise(plain: httpx.Client, llm: LLM, sampling: dict[str, Any]) -> None:
    (expected,) = llm.chat(STORY, SamplingParams(max_tokens=60, logprobs=2, **sampling), use_tqdm=False)
    body = {"messages": STORY, "max_tokens": 60, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = plain.post("/v1/chat/completions", json=body | sampling).json()
    for output, choice in zip(expected.outputs, answer["choices"], strict=True):
        assert choice["message"]["content"] == output.text
        assert choice["token_ids"] == output.token_ids
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs == [next(iter(position.values())).logprob for position in output.logprobs or []]


PROMPTS = st.sampled_from(["The sea", "加拿大的首都", "A 🦊 and", "é", "1, 2, 3,"])
STOPS = st.sampled_from(
    ["the", " ", "a", "of Ca", "狐", "，", "。", "首都", "🦊", "Ottawa", "\n", 'city": ', "</tool_call>"]
)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 30),
    "temperature": st.sampled_from([0, 0.7, 1.5]),
    "stop": st.lists(STOPS, min_size=1, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "min_tokens": st.just(1),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "stop_token_ids": st.just([13, 14, 15]),
    "logit_bias": st.sampled_from([{"3000": 1.5}, {str(token): 100 for token in range(128, 256)}]),
}
"""Strategies for the fields that chats and completions share. The last bias allows only byte tokens, which yield
characters of several tokens and incomplete characters."""
COMPLETIONS = {
    "echo": st.booleans(),
    "logprobs": st.integers(0, 3),
    "prompt": PROMPTS | st.lists(PROMPTS, min_size=1, max_size=3),
}
CHATS = {
    "logprobs": st.just(True),
    "messages": st.sampled_from([OTTAWA, STORY, IN_PARIS, [{"role": "user", "content": "Say 🦊 and 渥太华."}]]),
    "tools": st.just([WEATHER]),
    "chat_template_kwargs": st.just({"enable_thinking": True}),
}


def bodies(fields: dict[str, st.SearchStrategy[Any]], required: str) -> st.SearchStrategy[dict[str, Any]]:
    fixed = {required: fields[required], "seed": st.integers(0, 2**32), "max_tokens": SHARED["max_tokens"]}
    return st.fixed_dictionaries(
        fixed, optional={name: values for name, values in (SHARED | fields).items() if name not in fixed}
    )


quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
drawn = settings(
    max_examples=int(os.environ.get("PENSTOCK_STREAMS", "25")),
    deadline=None,
    derandomize=True,
    suppress_health_check=quiet,
)


@given(bodies(COMPLETIONS, "prompt"))
@drawn
def test_streamed_completion_equals_complete_one(plain: httpx.Client, body: dict[str, Any]) -> None:
    check_stream(plain, "/v1/completions", body)


@given(bodies(CHATS, "messages"))
@drawn
def test_streamed_chat_equals_complete_one(plain: httpx.Client, body: dict[str, Any]) -> None:
    check_stream(plain, "/v1/chat/completions", body)


def check_stream(plain: httpx.Client, path: str, body: dict[str, Any]) -> None:
    complete = plain.post(path, json=body)
    assert complete.status_code == 200, complete.text
    expected = complete.json()
    chunks = streamed(plain, path, body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert counts(chunks[-1]["usage"]) == counts(expected["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1
    joined = join(chunks)
    for choice in expected["choices"]:
        assert joined[choice["index"]] == flat(choice)
    if not body.keys() & {"include_stop_str_in_output", "min_tokens", "echo"}:
        texts = [parts["text"] for parts in joined.values()]
        assert not [text for text in texts for stop in body.get("stop", ()) if stop in text]


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the token counts of a usage object, without those of the prefix cache."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


def streamed(plain: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with plain.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, nothing = response.read().decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of a chat or a completion in a common form, without ids of tool calls."""
    message = choice.get("message", choice)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    logprobs = choice["logprobs"] or {}
    lists = {name: values for name, values in logprobs.items() if values is not None}
    return {
        "text": message.get("content", message.get("text")) or "",
        "thought": message.get("reasoning_content") or "",
        "calls": calls,
        "logprobs": lists,
        **{name: choice.get(name) for name in ("finish_reason", "stop_reason", "token_ids")},
    }


def join(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Concatenate stream chunks; return the choices by index, in the form of ``flat``."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        new = flat({"message": choice["delta"], **choice} if "delta" in choice else choice)
        joined = choices.setdefault(
            choice["index"], {"text": "", "thought": "", "calls": [], "logprobs": {}, "token_ids": None}
        )
        assert joined.get("finish_reason") is None, "no chunk may follow the finish reason"
        joined["text"] += new["text"]
        joined["thought"] += new["thought"]
        for part in choice.get("delta", {}).get("tool_calls", []):
            if "id" in part:
                joined["calls"].append({"name": part["function"].pop("name"), "arguments": ""})
            assert part["index"] == len(joined["calls"]) - 1, (
                "a call must begin with its name, and calls must not interleave"
            )
            joined["calls"][-1]["arguments"] += part["function"].pop("arguments")
            assert not part["function"]
        for name, values in new["logprobs"].items():
            joined["logprobs"][name] = joined["logprobs"].get(name, []) + values
        if new["token_ids"] is not None:
            joined["token_ids"] = (joined["token_ids"] or []) + new["token_ids"]
        joined |= {name: new[name] for name in ("finish_reason", "stop_reason")}
    return choices


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"return_token_ids": True}])
def test_streamed_chat_contains_prompt_logprobs_and_token_ids(plain: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": OTTAWA, "max_tokens": 2, "temperature": 0, **fields}
    complete = plain.post("/v1/chat/completions", json=body).json()
    chunks = streamed(plain, "/v1/chat/completions", body)
    for name in ("prompt_logprobs", "prompt_token_ids"):
        if name in complete:
            assert [chunk[name] for chunk in chunks if chunk.get(name)] == [complete[name]]


@given(st.text())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=quiet)
def test_detokenize_returns_tokenized_text(plain: httpx.Client, text: str) -> None:
    tokenized = plain.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert plain.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": text, "content": text}


def test_tokenized_chat_equals_prompt_of_chat(plain: httpx.Client) -> None:
    body = {"messages": IN_PARIS, "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
    tokenized = plain.post("/tokenize", json=body).json()
    answer = plain.post("/v1/chat/completions", json=body | {"max_tokens": 1, "return_token_ids": True}).json()
    assert tokenized["count"] == answer["usage"]["prompt_tokens"]
    assert tokenized["tokens"] == answer["prompt_token_ids"]


# --- Ids, errors and the log ----------------------------------------------------------------------------------------


def test_valid_request_id_is_kept_and_invalid_one_replaced(server: Served, plain: httpx.Client) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    for given_id in ("mine-1/ä".encode("latin-1"), b"x" * 129, b"a b", b""):
        answer = plain.post("/v1/completions", json=body, headers=[(b"X-Request-Id", given_id)])
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), given_id
    for headers in ({"X-Request-Id": "mine:1"}, {}):
        answer = plain.post("/v1/completions", json=body, headers=headers)
        name = headers.get("X-Request-Id", answer.headers["x-request-id"])
        assert answer.headers.get_list("x-request-id") == [name]
        assert answer.json()["id"] == f"cmpl-{name}"
        line = server.find(rf"POST /v1/completions id={name} status=200").string
        assert all(f" {field}" in line for field in ("prompt=1", "output=2", "finish=length"))
        assert re.search(r" ttft=\d+\.\d+ .*e2e=\d+\.\d+ ", line)


WRONG: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "no object": ("/v1/completions", {}, 400, "prompt"),
    "a range": ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    "a type": ("/v1/completions", {"prompt": "x", "max_tokens": "ten"}, 400, "max_tokens"),
    "together": ("/v1/completions", {"prompt": "x", "max_tokens": 1, "min_tokens": 2}, 400, "min_tokens"),
    "too long": ("/v1/completions", {"prompt": [5] * 3000}, 400, "prompt"),
    "no token": ("/v1/completions", {"prompt": [5000]}, 400, "prompt"),
    "no model": ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model"),
    "no role": ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    "no content": ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "an image": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0]",
    ),
    "no such tokens": ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    "alone": ("/v1/chat/completions", {"messages": STORY, "top_logprobs": 1}, 400, "top_logprobs"),
    "the template's": (
        "/v1/chat/completions",
        {"messages": STORY, "chat_template_kwargs": {"tools": 1}},
        400,
        "chat_template_kwargs",
    ),
    "both": ("/tokenize", {"prompt": "x", "messages": STORY}, 400, "prompt"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_error_names_its_field_and_is_logged_once(server: Served, plain: httpx.Client, name: str, stream: bool) -> None:
    path, body, status, param = WRONG[name]
    if stream and path.startswith("/v1"):
        body = body | {"stream": True}
    request_id = f"wrong-{name}-{stream}".replace(" ", "-").replace("'", "")
    line_count = len(server.lines)
    error = error_of(plain.post(path, json=body, headers={"X-Request-Id": request_id}), status)
    assert error["param"] == param
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    server.find(f"id={request_id}", after=line_count)
    plain.post("/v1/completions", json={}, headers={"X-Request-Id": f"after-{request_id}"})
    server.find(f"id=after-{request_id}", after=line_count)  # by then, the first request is logged
    (line,) = [line for line in server.lines[line_count:] if f"id={request_id} " in line]
    assert f"status={status}" in line
    reason = "prompt: has 3000 tokens" if name == "too long" else error["message"]
    assert f"reason={json.dumps(reason, ensure_ascii=False)}"[:-1] in line


SPECIFIC = {"provider_specific_fields": None}
CALLED = {
    **SPECIFIC,
    "role": "assistant",
    "content": None,
    "function_call": None,
    "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **SPECIFIC}}],
}
CACHED = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
UNKNOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"id": "x", "role": "user", "content": [CACHED]}, CALLED, CALLED | {"id": "y"}],
            "tools": [WEATHER | {"cache_control": {}}],
            "stream": True,
            "stream_options": {"include_usage": True, "more": 1},
            "metadata": {"chat_id": 5},
            "num_ctx": 4096,
        },
        "num_ctx, stream_options.more, messages[0].id, messages[0].content[0].cache_control, "
        "messages[1].provider_specific_fields, messages[1].reasoning_details, "
        "messages[1].tool_calls[0].function.provider_specific_fields, tools[0].cache_control",
    ),
    "completion": ("/v1/completions", {"prompt": "x", "temprature": 1, "options": {}}, "temprature, options"),
    "template": ("/v1/chat/completions", {"messages": STORY, "reasoning_effort": "low"}, "reasoning_effort"),
    "embedding": ("/v1/embeddings", {"input": "x", "input_type": "query"}, "input_type"),
    "score": ("/score", {"text_1": "x", "text_2": "y", "softmax": True}, "softmax"),
    "tokens": ("/tokenize", {"messages": [{"role": "user", "content": "x", "id": "y"}]}, "messages[0].id"),
    "text": ("/detokenize", {"tokens": [5], "more": None}, "more"),
    "generate": ("/generate", {"prompt": "x", "more": 1}, "more"),
    "message": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [CACHED], "id": "x"}], "thinking": {"type": "disabled", "x": 1}},
        "messages[0].id, thinking.x",
    ),
    "message's tokens": ("/v1/messages/count_tokens", {"messages": STORY, "more": 1}, "more"),
    "response": ("/v1/responses", {"input": "x", "text": {"verbosity": "low"}, "more": 1}, "more, text.verbosity"),
    "response's tokens": ("/v1/responses/input_tokens", {"input": "x", "more": 1}, "more"),
    "bladellm": ("/v1/completions", {"prompt": "x", "more": 1}, "more"),
    "paddlenlp": ("/v1/completions", {"text": "x", "max_declen": 1}, "max_declen"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_fields_are_ignored_and_listed_in_header(plain: httpx.Client, strict: Served, name: str) -> None:
    """The test covers every dialect, at every depth. Strict servers refuse the same requests."""
    path, body, ignored = UNKNOWN[name]
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        body = body | {"max_tokens": 1}
    key = "one" if name == "bladellm" else "Bearer one"
    answer = plain.post(path, json=body, headers={"Authorization": key})
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers["x-penstock-ignored"].split(", ")) == sorted(ignored.split(", "))
    refused = httpx.post(strict.root + path, json=body, headers={"Authorization": key})
    assert any(f"{field}: " in refused.text for field in ignored.split(", ")), refused.text
    assert refused.status_code == 400 or '"error_code":400' in refused.text
    assert "x-penstock-ignored" not in refused.headers


def test_strict_server_suggests_nearest_field(strict: Served) -> None:
    wrong = {"max_token": "max_tokens", "temprature": "temperature", "topp": "top_p"}
    for field, nearest in wrong.items():
        error = error_of(httpx.post(f"{strict.url}/completions", json={"prompt": "x", field: 1}, headers=KEY), 400)
        assert error["message"] == f"{field}: no such field; did you mean {nearest}?"
    body = {"messages": [{"role": "user", "contents": "x"}]}
    error = error_of(httpx.post(f"{strict.url}/chat/completions", json=body, headers=KEY), 400)
    assert error["message"] == "messages[0].contents: no such field; did you mean content?"
    schemas = httpx.get(f"{strict.root}/openapi.json", headers=KEY).json()["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is False


def test_strict_server_accepts_items_of_earlier_responses(strict: Served) -> None:
    """Agents send items and content blocks of a response back in their next request."""
    question = {"role": "user", "content": "What is the weather in Paris?"}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(strict.root + path, json=body | {"temperature": 0}, headers=KEY)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    body = {"input": [question], "tools": [{"type": "function", "name": "get_weather", "parameters": schema}]}
    body |= {"chat_template_kwargs": {"enable_thinking": True}}
    output = post("/v1/responses", body | {"tool_choice": "required"})["output"]
    call = output[-1]
    assert (output[0]["type"], call["type"]) == ("reasoning", "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temperature": 21}'}
    second_output = post("/v1/responses", body | {"input": [question, *output, result]})["output"]
    assert second_output
    post("/v1/responses", body | {"input": [question, *output, result, *second_output, question]})

    cached = {"cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 200, "tools": [{"name": "get_weather", "input_schema": schema} | cached]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 100}}
    content = post("/v1/messages", body | {"messages": [question], "tool_choice": {"type": "any"}})["content"]
    assert [block["type"] for block in content] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": '{"temperature": 21}'}
    tool_message = {"role": "user", "content": [result | cached | {"is_error": False}]}
    messages = [question, {"role": "assistant", "content": content}, tool_message]
    assert post("/v1/messages", body | {"messages": messages})["content"]


def test_unknown_field_is_logged_once_per_client(server: Served, plain: httpx.Client) -> None:
    line_count = len(server.lines)
    for agent in ("one/1.0", "one/1.0", "two/1.0"):
        body = {"prompt": "x", "max_tokens": 1, "num_ctx": 1}
        plain.post("/v1/completions", json=body, headers={"User-Agent": agent, "X-Request-Id": agent[:3]})
    server.find("id=two status=200", after=line_count)
    lines = [line for line in server.lines[line_count:] if "unknown fields are ignored: num_ctx" in line]
    assert [re.findall(r"127\.0\.0\.1 (\w+)/1\.0", line) for line in lines] == [["one"], ["two"]]


def test_hostile_field_names_are_escaped_and_cut_in_header(server: Served, plain: httpx.Client) -> None:
    names = ["x" * 100_000, "\r\nset-cookie: a=b", "é, ü", "", '"', *[f"field{i}" for i in range(20_000)]]
    line_count = len(server.lines)
    answer = plain.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | dict.fromkeys(names, 1))
    assert answer.status_code == 200
    ignored = answer.headers["x-penstock-ignored"]
    assert ignored.isascii() and ignored.isprintable() and len(ignored) <= 1024
    assert ignored.split(", ")[:5] == ["x" * 64, "??set-cookie:?a=b", "????", "", '"'] and ignored.endswith(", ...")
    assert "set-cookie" not in answer.headers
    server.find("unknown fields are ignored: xxx", after=line_count)
    assert max(map(len, server.lines[line_count:])) < 4096


def test_unsupported_field_is_refused_by_name(plain: httpx.Client) -> None:
    """Values without effect, such as null, are accepted."""
    refused = {"logits_processors": [], "prompt_embeds": "x"}
    for field, value in refused.items():
        error = error_of(plain.post("/v1/completions", json={"prompt": "x", field: value}), 400)
        assert error["message"] == f"{field}: not supported yet"
    without_effect = {"suffix": "", "prompt_embeds": None}
    without_effect |= dict.fromkeys(refused.keys() - without_effect.keys())
    assert plain.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **without_effect}).status_code == 200
    for field, value in {"tool_choice": "required", "store": True, "audio": {}}.items():
        error = error_of(plain.post("/v1/chat/completions", json={"messages": STORY, field: value}), 400)
        assert error["message"].startswith(f"{field}: ")


def test_body_is_parsed_as_json_with_any_content_type(plain: httpx.Client) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 1})
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8", ""):
        answer = plain.post("/v1/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == 200, kind


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/engines", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/models", 405),
    ],
)
def test_wrong_paths_and_methods_give_openai_errors(plain: httpx.Client, method: str, path: str, status: int) -> None:
    error = error_of(plain.request(method, path), status)
    assert error["message"].startswith(f"{method} {path}: ")
    assert error["code"] == status
    assert error["type"] == ("not_found_error" if status == 404 else "method_not_allowed_error")


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/version", "/v2", "/openapi.json", "/nowhere"])
def test_head_has_status_and_content_type_of_get(plain: httpx.Client, path: str) -> None:
    head, get = plain.head(path), plain.get(path)
    assert head.status_code == get.status_code and head.content == b""
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert plain.head("/v1/completions").status_code == 405


TOO_LONG = [{"role": "user", "content": "a " * 4000}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": TOO_LONG}, "messages"),
        ("/v1/chat/completions", {"messages": TOO_LONG, "stream": True}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 400_000}]}, "messages"),
        ("/v1/completions", {"prompt": "a " * 4000}, "prompt"),
        ("/v1/embeddings", {"input": ["a", "a " * 4000]}, "input"),
        ("/v1/responses", {"input": "a " * 4000}, "input"),
    ],
)
def test_prompt_beyond_context_gives_openai_error(
    plain: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(plain.post(path, json=body), 400)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "context_length_exceeded", param)
    message = rf"This model's maximum context length is 2048 tokens\. However, your {param} resulted in (\d+) tokens\."
    match = re.match(message, error["message"])
    assert match and int(match[1]) > 2048


def test_clients_recognise_prompt_beyond_context(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(f"openai/{MODEL}", TOO_LONG, api_base=server.url, api_key="none")
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(f"hosted_vllm/{MODEL}", TOO_LONG, api_base=server.url, api_key="none")
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(f"anthropic/{MODEL}", TOO_LONG, api_base=server.root, api_key="none")
    with pytest.raises(ContextOverflowError):
        ChatOpenAI(model=MODEL, base_url=server.url, api_key="none").invoke("a " * 4000)  # type: ignore[arg-type]


def test_cors_allows_configured_origins(plain: httpx.Client, strict: Served) -> None:
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = plain.options("/v1/chat/completions", headers={"Origin": "https://any.example", **preflight})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    path = f"{strict.url}/chat/completions"
    assert httpx.options(path, headers={"Origin": "https://b.example", **preflight}).status_code == 400
    allowed = httpx.options(path, headers={"Origin": "https://a.example", **preflight})
    assert allowed.status_code == 200, "a preflight request has no API key"
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    answer = httpx.get(f"{strict.url}/models", headers={"Origin": "https://a.example", "Authorization": "one"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    assert exposed >= {"x-request-id", "x-weights-version", "x-penstock-ignored", "x-penstock-truncated"}


# --- Keys and limits ------------------------------------------------------------------------------------------------


def test_api_keys_are_required(strict: Served) -> None:
    for key in ("Bearer one", "Bearer two", "bearer  three", "two"):
        assert httpx.get(f"{strict.url}/models", headers={"Authorization": key}).status_code == 200, key
    for key in ("Bearer four", "Bearer", "Basic one", "one,three", "ONE", "Bearer onex", "\xff"):
        headers = {"Authorization": key.encode("latin-1")}
        error = error_of(httpx.get(f"{strict.url}/models", headers=headers), 401)  # type: ignore[arg-type]
        assert error["code"] == "invalid_api_key"
    error_of(httpx.post(f"{strict.url}/chat/completions", json={"messages": OTTAWA}), 401)
    error_of(httpx.get(f"{strict.root}/openapi.json"), 401)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=strict.url, api_key="four", max_retries=0).models.list()
    assert openai.OpenAI(base_url=strict.url, api_key="two").models.list().data[0].id == MODEL


def test_health_needs_no_key(strict: Served) -> None:
    for path in ("/health", "/ready", "/live", "/version", "/metrics"):
        assert httpx.get(strict.root + path).status_code == 200


KEY = {"Authorization": "Bearer one"}


def test_body_beyond_limit_is_refused(strict: Served) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    allowed, too_large = body + b" " * (20_000 - len(body)), body + b" " * (20_001 - len(body))
    assert httpx.post(f"{strict.url}/completions", content=allowed, headers=KEY).status_code == 200
    error = error_of(httpx.post(f"{strict.url}/completions", content=too_large, headers=KEY), 413)
    assert "at most 20000 bytes" in error["message"]
    error_of(httpx.post(f"{strict.url}/completions", content=iter([too_large]), headers=KEY), 413)  # a chunked body


def head(*lines: str, body: str = "") -> bytes:
    request = ["POST /v1/completions HTTP/1.1", "host: x", "authorization: Bearer one", *lines, "", body]
    return "\r\n".join(request).encode()


def talk(served: Served, *packets: bytes, limit: float = 60.0) -> tuple[bytes, bool]:
    """Send packets; return the received bytes, and True if the server has closed the connection."""
    with socket.create_connection(("127.0.0.1", int(served.root.rpartition(":")[2])), timeout=limit) as connection:
        received = b""
        try:
            for packet in packets:
                connection.sendall(packet)
            while more := connection.recv(2**16):
                received += more
        except TimeoutError:
            return received, False
        except ConnectionError:
            return received, True
        return received, True


def test_headers_growing_beyond_limit_are_refused(strict: Served) -> None:
    received, closed = talk(strict, head("x: " + "y" * 3000)[:-4], b"y" * 2000)
    assert received.startswith(b"HTTP/1.1 431 ")
    assert closed


def test_headers_beyond_limit_in_one_packet_are_refused(strict: Served) -> None:
    body = '{"prompt": "x", "max_tokens": 1}'
    received, _ = talk(strict, head("x: " + "y" * 5000, f"content-length: {len(body)}", "connection: close", body=body))
    assert received.startswith(b"HTTP/1.1 431 ")


@pytest.mark.slow
def test_silent_client_gets_timeout_error(strict: Served) -> None:
    start = time.monotonic()
    received, _ = talk(strict, head("content-length: 100", body='{"prompt": '))
    status, _, body = received.decode().partition("\r\n\r\n")
    assert status.startswith("HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"] == "body: nothing was received for 1 seconds"
    assert time.monotonic() - start > 1
    received, closed = talk(strict, head("x: y")[:-4])
    assert (received, closed) == (b"", True), "an incomplete head must get no response"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("length", [100, 100_000])
def test_connection_is_closed_after_incomplete_body(strict: Served, length: int) -> None:
    _, closed = talk(strict, head(f"content-length: {length}", body='{"prompt": '))
    assert closed


def test_upgrade_request_is_answered_over_http_1(server: Served) -> None:
    """Java's HttpClient requests an upgrade to HTTP/2 by default."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    connection = http.client.HTTPConnection("127.0.0.1", int(server.root.rpartition(":")[2]), timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", '{"prompt": "x", "max_tokens": 1}', upgrade)
        answer = connection.getresponse()
        assert answer.status == 200 and json.load(answer)["usage"]["completion_tokens"] == 1


def test_connection_is_reused_after_errors_and_streams(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.root.rpartition(":")[2]), timeout=60)
    with contextlib.closing(connection):
        for body in ('{"prompt": "x", "max_tokens": 1}', "{", '{"prompt": "x", "max_tokens": 1, "stream": true}') * 2:
            connection.request("POST", "/v1/completions", body)
            used_socket = connection.sock
            answer = connection.getresponse()
            assert answer.status == (400 if body == "{" else 200)
            answer.read()
            assert connection.sock is used_socket


@pytest.mark.slow
def test_max_concurrency_and_request_timeout_are_enforced() -> None:
    """The server is started with ``--max-concurrency 1`` and ``--request-timeout 1.5``."""
    body = {"prompt": "The sea", "max_tokens": 2000, "ignore_eos": True, "n": 8}
    with (
        Served(*BLOCKS, "--max-concurrency", "1", "--request-timeout", "1.5") as served,
        httpx.Client(base_url=served.root, timeout=60) as client,
    ):
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = httpx.post(f"{served.url}/completions", json=body)
            assert error_of(refused, 429)["type"] == "rate_limit_error"
            assert refused.headers["retry-after"] == "1"
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert done == "data: [DONE]"
        error_of(client.post("/v1/completions", json=body), 408)


# --- TLS, several processes, metrics --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, ssl.SSLContext]]:
    """Server with HTTPS and two API processes, and an SSL context that trusts its certificate."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    (folder / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (folder / "chain.pem").write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    files = ("--ssl-certfile", str(folder / "chain.pem"), "--ssl-keyfile", str(folder / "key.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with Served(*BLOCKS, *files, "--api-server-count", "2") as served:
        yield served, context


def test_https_chat_requires_trusted_certificate(secure: tuple[Served, ssl.SSLContext]) -> None:
    served, context = secure
    assert served.url.startswith("https://")
    with openai.OpenAI(base_url=served.url, api_key="none", http_client=httpx.Client(verify=context)) as client:
        chunks = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "The capital of Canada is Ottawa."
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{served.root}/live")


def samples(served: Served, verify: ssl.SSLContext | bool = True) -> Counter[tuple[str, ...]]:
    """Return metric values by name and label values, without ``model_name``."""
    text = httpx.get(f"{served.root}/metrics", verify=verify).text
    values: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for label, value in sorted(sample.labels.items()) if label != "model_name"]
            values[sample.name.removeprefix("penstock:"), *labels] = sample.value
    return values


def check_metrics(served: Served, client: httpx.Client, verify: ssl.SSLContext | bool = True) -> None:
    """Send requests of several kinds; check that the metrics have grown by exactly these requests."""
    before = samples(served, verify)
    tokens: Counter[str] = Counter()
    for _ in range(6):
        for body in ({"prompt": "The sea", "max_tokens": 5, "n": 2}, {"prompt": ["One", "Two words"], "max_tokens": 3}):
            usage = client.post("/v1/completions", json=body | {"ignore_eos": True}).json()["usage"]
            tokens += Counter({name: usage[f"{name}_tokens"] for name in ("prompt", "completion")})
        error_of(client.post("/v1/completions", json={"prompt": "x" * 5000}), 400)
        error_of(client.post("/v1/completions", json={"prompt": "x", "top_p": 2}), 400)
    growth = samples(served, verify)
    growth.subtract(before)
    assert growth["prompt_tokens_total",] == tokens["prompt"]
    assert growth["generation_tokens_total",] == tokens["completion"]
    assert growth["request_success_total", "length"] == 6 * 4
    assert growth["request_failures_total", "too_long"] == growth["request_failures_total", "invalid"] == 6
    assert growth["http_responses_total", "/v1/completions", "200"] == 6 * 2
    assert growth["http_responses_total", "/v1/completions", "400"] == 6 * 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert growth[f"{name}_seconds_count",] == 6 * 3
        assert growth[f"{name}_seconds_bucket", "+Inf"] == 6 * 3
    assert growth["request_prompt_tokens_sum",] == tokens["prompt"]
    assert growth["request_generation_tokens_sum",] == tokens["completion"]
    assert growth["num_requests_open",] == 0


def test_metrics_count_requests_and_tokens(server: Served, plain: httpx.Client) -> None:
    check_metrics(server, plain)


def test_metrics_page_covers_all_api_processes(secure: tuple[Served, ssl.SSLContext]) -> None:
    served, context = secure
    with httpx.Client(base_url=served.root, verify=context, headers={"connection": "close"}) as client:
        check_metrics(served, client, context)
    matches = [re.match(r"\S+ \S+ (api-\d):", line) for line in served.lines if "POST /v1/completions" in line]
    assert {match[1] for match in matches if match} == {"api-0", "api-1"}, "both processes must have answered"
    pages = [samples(served, context)["http_responses_total", "/v1/completions", "200"] for _ in range(8)]
    assert len(set(pages)) == 1


def test_json_log_has_request_fields(strict: Served) -> None:
    with httpx.Client(base_url=strict.root, headers=KEY) as client:
        for number, body in enumerate(({"prompt": 'x\n"y"', "max_tokens": 3}, {"prompt": "x", "stop": ""})):
            client.post("/v1/completions", json=body, headers={"X-Request-Id": f"json-{number}"})
            strict.find(f"json-{number}")
    lines = [json.loads(line) for line in strict.lines]
    assert all({"time", "level", "process", "logger", "message"} <= line.keys() for line in lines)
    assert {"serve", "engine", "api"} <= {line["process"] for line in lines}
    (good,) = [line for line in lines if line.get("id") == "json-0"]
    assert (good["status"], good["output"], good["finish"], good["cached"]) == (200, 3, "length", 0)
    assert 0 <= good["queue"] <= good["ttft"] <= good["e2e"] <= good["seconds"]
    (wrong,) = [line for line in lines if line.get("id") == "json-1"]
    assert (wrong["status"], wrong["error"]) == (400, "invalid")
    assert wrong["reason"].startswith("stop: ")


# --- Start ----------------------------------------------------------------------------------------------------------


def test_first_request_after_ready_is_answered() -> None:
    served = Served(*BLOCKS)
    try:
        served.start()
        answer = httpx.post(f"{served.url}/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        served.kill()


def start_error(*arguments: str) -> str:
    """Return the error message of a server that fails to start, which must be a single line."""
    result = subprocess.run([*SERVE, *BLOCKS, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    (sentence,) = result.stderr.splitlines()
    return sentence


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        sentence = start_error("--host", "127.0.0.1", "--port", port)
    assert sentence.endswith(f"cannot listen on 127.0.0.1:{port}: address already in use; use another --port")


def test_host_without_interface_is_reported() -> None:
    sentence = start_error("--host", "192.0.2.99", "--port", "8000", "--api-key", "key")
    assert sentence.endswith("cannot listen on 192.0.2.99:8000: cannot assign requested address; use another --host")


def test_missing_model_is_reported() -> None:
    assert "/nowhere does not exist" in usage_error("/nowhere")


def test_unknown_option_in_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("max_num_seq: 5\n")
    sentence = f"penstock serve: max_num_seq: no such option, in {file}; did you mean max_num_seqs?\n"
    assert usage_error("--config", str(file)) == sentence


def test_wrong_environment_value_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "0")
    sentence = usage_error()
    assert "max_num_seqs" in sentence and "PENSTOCK_MAX_NUM_SEQS" in sentence


def test_unknown_flag_is_reported_with_suggestion() -> None:
    assert usage_error("--prot", "1") == "penstock serve: unknown argument --prot; did you mean --port?\n"


def test_tls_key_without_certificate_is_reported() -> None:
    assert "ssl_certfile" in start_error("--port", "0", "--ssl-keyfile", __file__)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("option", "message"),
    [("--ssl-certfile", "ssl_certfile"), ("--chat-template", "chat_template"), ("--tokenizer", "tokenizer")],
)
def test_invalid_file_option_is_reported(option: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if option == "--ssl-certfile":
        file.write_text("no certificate")
    assert message in start_error("--port", "0", option, str(file))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_broken_checkpoint_is_reported(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo.CHAT, model)
    (model / name).write_text("{")
    assert str(model) in start_error("--port", "0", str(model))
