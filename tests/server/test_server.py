"""``penstock serve`` through the clients that people have, and through plain sockets where these are too polite."""

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
    """With keys and narrow limits, its log in JSON, and unknown fields refused."""
    limits = ("--max-body-size", "20000", "--max-header-size", "4000", "--client-timeout", "1")
    keys = ("--api-key", "one,three", "--api-key", "two", "--allowed-origins", "https://a.example")
    with Served(*BLOCKS, *limits, *keys, "--log-format", "json", "--strict-requests") as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def plain(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.root, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=400)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, which has the shape that all have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# --- Clients that people have ---------------------------------------------------------------------------------------


def test_openai_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0)
    assert answer.choices[0].message.content == "The capital of Canada is Ottawa."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_openai_streams(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=OTTAWA, temperature=0, stream=True, stream_options=options
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of Canada is Ottawa."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert last.choices == []
    whole = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0)
    assert last.usage and whole.usage
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("forced", [False, True])
def test_openai_gathers_streams(client: openai.OpenAI, forced: bool) -> None:
    """Also of a call that is there at once with the end of the answer, as nothing in it is left to the model."""
    at_once: Any = {"type": "function", "function": {"name": "wait", "parameters": {"additionalProperties": False}}}
    asked: dict[str, Any] = {"tools": [at_once], "tool_choice": "required"} if forced else {"tools": [WEATHER]}
    asked["parallel_tool_calls"] = False
    with client.chat.completions.stream(model=MODEL, messages=IN_PARIS, temperature=0, **asked) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == ({} if forced else {"city": "巴黎"})
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_openai_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["One", "两"], n=2, seed=1, temperature=1, max_tokens=5, logprobs=2, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:1] for choice in answer.choices] == ["O", "O", "两", "两"]
    for choice in answer.choices:
        found = choice.logprobs
        assert found and found.tokens and found.token_logprobs and found.text_offset
        assert "".join(found.tokens) == choice.text
        assert found.token_logprobs[0] is None, "nothing predicts the first"
        for token, at in zip(found.tokens, found.text_offset, strict=True):
            assert choice.text[at:].startswith(token)


def test_openai_gets_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=OTTAWA, temperature=0, logprobs=True, top_logprobs=3, max_tokens=6
    )
    found = answer.choices[0].logprobs
    assert found and found.content and len(found.content) == 6
    for token in found.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert bytes(token.bytes or []).decode() == token.token


def test_openai_stops(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0, stop=["Ott", "of C"])
    assert answer.choices[0].message.content == "The capital "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].to_dict()["stop_reason"] == "of C"


def test_openai_gives_what_it_does_not_know_itself(client: openai.OpenAI) -> None:
    """vLLM's names, in ``extra_body``."""
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 3}
    extra |= {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True, "cache_salt": "mine"}
    answer = client.chat.completions.create(model=MODEL, messages=OTTAWA, max_tokens=20, seed=1, extra_body=extra)
    assert answer.choices[0].message.to_dict()["reasoning_content"]
    assert answer.usage and answer.usage.completion_tokens == 20
    assert len(answer.choices[0].to_dict()["token_ids"]) == 20  # type: ignore[arg-type]


def test_openai_calls_tools_and_answers_from_them(client: openai.OpenAI) -> None:
    messages: list[Any] = [*IN_PARIS]
    asked = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, tools=[WEATHER])
    assert asked.choices[0].finish_reason == "tool_calls"
    (call,) = asked.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "巴黎"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21, "sky": "晴天"}'}
    messages += [asked.choices[0].message, result]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, tools=[WEATHER])
    assert "21" in (answer.choices[0].message.content or "")
    text = client.chat.completions.create(
        model=MODEL, messages=IN_PARIS, temperature=0, tools=[WEATHER], tool_choice="none"
    )
    assert text.choices[0].message.tool_calls is None


def test_openai_finds_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError, match="available: penstock-demo"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="other", prompt="?")
    assert refused.value.code == "model_not_found"
    assert client.completions.create(model="default", prompt="?", max_tokens=1).model == MODEL


def test_openai_runs_many_at_once(server: Served) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                chunks = await client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            async def whole() -> str:
                answer = await client.completions.create(model=MODEL, prompt="The sea", temperature=0, max_tokens=8)
                return answer.choices[0].text

            found = await asyncio.gather(*[streamed() for _ in range(8)], *[whole() for _ in range(8)])
            assert set(found[:8]) == {"The capital of Canada is Ottawa."}
            assert len(set(found[8:])) == 1

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_litellm_chats_and_streams(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    given: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": server.url, "api_key": "none", "temperature": 0}
    answer = litellm.completion(messages=OTTAWA, **given)
    assert answer.choices[0].message.content == "The capital of Canada is Ottawa."
    chunks = litellm.completion(messages=OTTAWA, stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of Canada is Ottawa."
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=OTTAWA, top_p=2, **given)


def test_litellm_calls_a_tool_and_goes_on(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of its documentation, in which its own message, with fields of its own, goes back as it is."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    given: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": server.url, "api_key": "none", "temperature": 0}
    messages: list[Any] = list(IN_PARIS)
    first = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="auto", **given)
    message = first.choices[0].message
    message.provider_specific_fields = {"refusal": None}
    messages.append(message)
    for call in message.tool_calls:
        answer = {"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": "22 °C"}
        messages.append(answer)
    second = litellm.completion(messages=messages, **given)
    assert message.tool_calls and second.choices[0].message.content


def test_langchain_sends_what_other_models_read(server: Served) -> None:
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
    said = [HumanMessage(parts), AIMessage("Hello", id="a", name="b"), HumanMessage("Who are you?")]
    assert chat.invoke(said).content
    assert "".join(str(piece.content) for piece in chat.stream(said))


def test_langchain_chats_and_streams(server: Served) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=server.url, api_key="none", temperature=0, stream_usage=True)  # type: ignore[arg-type]
    answer = chat.invoke("What is the capital of Canada?")
    assert answer.content == "The capital of Canada is Ottawa."
    assert answer.usage_metadata
    pieces = list(chat.stream("What is the capital of Canada?"))
    assert "".join(str(piece.content) for piece in pieces) == answer.content
    assert (
        sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata)
        == (answer.usage_metadata["output_tokens"])
    )
    (call,) = chat.bind_tools([WEATHER]).invoke("巴黎的天气怎么样？").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "巴黎"})


# --- The same as LLM, streamed and whole ----------------------------------------------------------------------------


GREEDY = {"temperature": 0, "top_p": 1, "top_k": 0}
DRAWN = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 7, "n": 3}


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_answers_are_those_of_llm_to_the_bit(plain: httpx.Client, llm: LLM, sampling: dict[str, Any]) -> None:
    (expected,) = llm.chat(STORY, SamplingParams(max_tokens=60, logprobs=2, **sampling), use_tqdm=False)
    asked = {"messages": STORY, "max_tokens": 60, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = plain.post("/v1/chat/completions", json=asked | sampling).json()
    for made, choice in zip(expected.outputs, answer["choices"], strict=True):
        assert choice["message"]["content"] == made.text
        assert choice["token_ids"] == made.token_ids
        found = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert found == [next(iter(position.values())).logprob for position in made.logprobs or []]


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
"""The last makes characters of several tokens, and some that never become whole."""
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


def bodies(own: dict[str, st.SearchStrategy[Any]], needed: str) -> st.SearchStrategy[dict[str, Any]]:
    fixed = {needed: own[needed], "seed": st.integers(0, 2**32), "max_tokens": SHARED["max_tokens"]}
    return st.fixed_dictionaries(fixed, optional={k: v for k, v in (SHARED | own).items() if k not in fixed})


quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
drawn = settings(
    max_examples=int(os.environ.get("PENSTOCK_STREAMS", "25")),
    deadline=None,
    derandomize=True,
    suppress_health_check=quiet,
)


@given(bodies(COMPLETIONS, "prompt"))
@drawn
def test_streamed_completions_are_whole_ones(plain: httpx.Client, body: dict[str, Any]) -> None:
    check_stream(plain, "/v1/completions", body)


@given(bodies(CHATS, "messages"))
@drawn
def test_streamed_chats_are_whole_ones(plain: httpx.Client, body: dict[str, Any]) -> None:
    check_stream(plain, "/v1/chat/completions", body)


def check_stream(plain: httpx.Client, path: str, body: dict[str, Any]) -> None:
    whole = plain.post(path, json=body)
    assert whole.status_code == 200, whole.text
    expected = whole.json()
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
    """Tokens, whatever was found in the cache."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


def streamed(plain: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with plain.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, nothing = response.read().decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of whichever dialect, without the ids of its calls."""
    message = choice.get("message", choice)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    logprobs = choice["logprobs"] or {}
    lists = {name: found for name, found in logprobs.items() if found is not None}
    return {
        "text": message.get("content", message.get("text")) or "",
        "thought": message.get("reasoning_content") or "",
        "calls": calls,
        "logprobs": lists,
        **{name: choice.get(name) for name in ("finish_reason", "stop_reason", "token_ids")},
    }


def join(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the chunks add up to, in the form of ``flat``."""
    found: dict[int, dict[str, Any]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        new = flat({"message": choice["delta"], **choice} if "delta" in choice else choice)
        into = found.setdefault(
            choice["index"], {"text": "", "thought": "", "calls": [], "logprobs": {}, "token_ids": None}
        )
        assert into.get("finish_reason") is None, "nothing comes after the end"
        into["text"] += new["text"]
        into["thought"] += new["thought"]
        for part in choice.get("delta", {}).get("tool_calls", []):
            if "id" in part:
                into["calls"].append({"name": part["function"].pop("name"), "arguments": ""})
            assert part["index"] == len(into["calls"]) - 1, "the name comes first, and one call after the other"
            into["calls"][-1]["arguments"] += part["function"].pop("arguments")
            assert not part["function"]
        for name, values in new["logprobs"].items():
            into["logprobs"][name] = into["logprobs"].get(name, []) + values
        if new["token_ids"] is not None:
            into["token_ids"] = (into["token_ids"] or []) + new["token_ids"]
        into |= {name: new[name] for name in ("finish_reason", "stop_reason")}
    return found


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"return_token_ids": True}])
def test_what_a_whole_chat_tells_of_its_prompt_a_stream_tells_too(plain: httpx.Client, asked: dict[str, Any]) -> None:
    body = {"messages": OTTAWA, "max_tokens": 2, "temperature": 0, **asked}
    whole = plain.post("/v1/chat/completions", json=body).json()
    chunks = streamed(plain, "/v1/chat/completions", body)
    for name in ("prompt_logprobs", "prompt_token_ids"):
        if name in whole:
            assert [chunk[name] for chunk in chunks if chunk.get(name)] == [whole[name]]


@given(st.text())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=quiet)
def test_tokens_and_back(plain: httpx.Client, text: str) -> None:
    made = plain.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert plain.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text, "content": text}


def test_tokens_of_a_chat_are_those_that_it_costs(plain: httpx.Client) -> None:
    body = {"messages": IN_PARIS, "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
    made = plain.post("/tokenize", json=body).json()
    answer = plain.post("/v1/chat/completions", json=body | {"max_tokens": 1, "return_token_ids": True}).json()
    assert made["count"] == answer["usage"]["prompt_tokens"]
    assert made["tokens"] == answer["prompt_token_ids"]


# --- Ids, errors and the log ----------------------------------------------------------------------------------------


def test_a_request_keeps_its_id(server: Served, plain: httpx.Client) -> None:
    body = {"prompt": "Hi", "max_tokens": 2}
    for given_id in ("mine-1/ä".encode("latin-1"), b"x" * 129, b"a b", b""):
        answer = plain.post("/v1/completions", json=body, headers=[(b"X-Request-Id", given_id)])
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), given_id
    for headers in ({"X-Request-Id": "mine:1"}, {}):
        answer = plain.post("/v1/completions", json=body, headers=headers)
        name = headers.get("X-Request-Id", answer.headers["x-request-id"])
        assert answer.headers.get_list("x-request-id") == [name]
        assert answer.json()["id"] == f"cmpl-{name}"
        told = server.find(rf"POST /v1/completions id={name} status=200").string
        assert all(f" {fact}" in told for fact in ("prompt=1", "output=2", "finish=length"))
        assert re.search(r" ttft=\d+\.\d+ .*e2e=\d+\.\d+ ", told)


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
def test_an_error_names_its_field_and_is_in_the_log_once(
    server: Served, plain: httpx.Client, name: str, stream: bool
) -> None:
    path, body, status, param = WRONG[name]
    if stream and path.startswith("/v1"):
        body = body | {"stream": True}
    own = f"wrong-{name}-{stream}".replace(" ", "-").replace("'", "")
    at = len(server.lines)
    error = error_of(plain.post(path, json=body, headers={"X-Request-Id": own}), status)
    assert error["param"] == param
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    server.find(f"id={own}", after=at)
    plain.post("/v1/completions", json={}, headers={"X-Request-Id": f"after-{own}"})
    server.find(f"id=after-{own}", after=at)  # now all of the other's lines are there
    (line,) = [line for line in server.lines[at:] if f"id={own} " in line]
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
def test_unknown_fields_are_ignored_and_told(plain: httpx.Client, strict: Served, name: str) -> None:
    """In every dialect and at every depth; strict requests are refused for the first of them."""
    path, body, told = UNKNOWN[name]
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        body = body | {"max_tokens": 1}
    key = "one" if name == "bladellm" else "Bearer one"
    answer = plain.post(path, json=body, headers={"Authorization": key})
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers["x-penstock-ignored"].split(", ")) == sorted(told.split(", "))
    refused = httpx.post(strict.root + path, json=body, headers={"Authorization": key})
    assert any(f"{place}: " in refused.text for place in told.split(", ")), refused.text
    assert refused.status_code == 400 or '"error_code":400' in refused.text
    assert "x-penstock-ignored" not in refused.headers


def test_strict_requests_name_the_nearest_field(strict: Served) -> None:
    wrong = {"max_token": "max_tokens", "temprature": "temperature", "topp": "top_p"}
    for field, near in wrong.items():
        error = error_of(httpx.post(f"{strict.url}/completions", json={"prompt": "x", field: 1}, headers=KEY), 400)
        assert error["message"] == f"{field}: no such field; did you mean {near}?"
    body = {"messages": [{"role": "user", "contents": "x"}]}
    error = error_of(httpx.post(f"{strict.url}/chat/completions", json=body, headers=KEY), 400)
    assert error["message"] == "messages[0].contents: no such field; did you mean content?"
    schemas = httpx.get(f"{strict.root}/openapi.json", headers=KEY).json()["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is False


def test_strict_requests_take_back_what_was_answered(strict: Served) -> None:
    """As agents do, which send the items and blocks of an answer with the next request."""
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
    more = post("/v1/responses", body | {"input": [question, *output, result]})["output"]
    assert more
    post("/v1/responses", body | {"input": [question, *output, result, *more, question]})

    cached = {"cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 200, "tools": [{"name": "get_weather", "input_schema": schema} | cached]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 100}}
    content = post("/v1/messages", body | {"messages": [question], "tool_choice": {"type": "any"}})["content"]
    assert [block["type"] for block in content] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": '{"temperature": 21}'}
    told = {"role": "user", "content": [result | cached | {"is_error": False}]}
    messages = [question, {"role": "assistant", "content": content}, told]
    assert post("/v1/messages", body | {"messages": messages})["content"]


def test_an_unknown_field_is_logged_once_a_client(server: Served, plain: httpx.Client) -> None:
    at = len(server.lines)
    for agent in ("one/1.0", "one/1.0", "two/1.0"):
        body = {"prompt": "x", "max_tokens": 1, "num_ctx": 1}
        plain.post("/v1/completions", json=body, headers={"User-Agent": agent, "X-Request-Id": agent[:3]})
    server.find("id=two status=200", after=at)
    told = [line for line in server.lines[at:] if "unknown fields are ignored: num_ctx" in line]
    assert [re.findall(r"127\.0\.0\.1 (\w+)/1\.0", line) for line in told] == [["one"], ["two"]]


def test_hostile_names_of_fields_stay_within_a_header(server: Served, plain: httpx.Client) -> None:
    names = ["x" * 100_000, "\r\nset-cookie: a=b", "é, ü", "", '"', *[f"field{i}" for i in range(20_000)]]
    at = len(server.lines)
    answer = plain.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | dict.fromkeys(names, 1))
    assert answer.status_code == 200
    told = answer.headers["x-penstock-ignored"]
    assert told.isascii() and told.isprintable() and len(told) <= 1024
    assert told.split(", ")[:5] == ["x" * 64, "??set-cookie:?a=b", "????", "", '"'] and told.endswith(", ...")
    assert "set-cookie" not in answer.headers
    server.find("unknown fields are ignored: xxx", after=at)
    assert max(map(len, server.lines[at:])) < 4096


def test_what_is_not_there_yet_is_refused_by_name(plain: httpx.Client) -> None:
    """But for values that ask for nothing."""
    refused = {"logits_processors": [], "prompt_embeds": "x"}
    for field, value in refused.items():
        error = error_of(plain.post("/v1/completions", json={"prompt": "x", field: value}), 400)
        assert error["message"] == f"{field}: not supported yet"
    nothing = {"suffix": "", "prompt_embeds": None}
    nothing |= dict.fromkeys(refused.keys() - nothing.keys())
    assert plain.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **nothing}).status_code == 200
    for field, value in {"tool_choice": "required", "store": True, "audio": {}}.items():
        error = error_of(plain.post("/v1/chat/completions", json={"messages": STORY, field: value}), 400)
        assert error["message"].startswith(f"{field}: ")


def test_a_body_is_json_whatever_it_is_called(plain: httpx.Client) -> None:
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
def test_wrong_paths_and_methods_are_told_in_the_same_shape(
    plain: httpx.Client, method: str, path: str, status: int
) -> None:
    error = error_of(plain.request(method, path), status)
    assert error["message"].startswith(f"{method} {path}: ")
    assert error["code"] == status
    assert error["type"] == ("not_found_error" if status == 404 else "method_not_allowed_error")


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/version", "/v2", "/openapi.json", "/nowhere"])
def test_head_tells_what_get_would(plain: httpx.Client, path: str) -> None:
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
def test_a_prompt_beyond_the_context_is_told_as_openai_does(
    plain: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = error_of(plain.post(path, json=body), 400)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "context_length_exceeded", param)
    words = rf"This model's maximum context length is 2048 tokens\. However, your {param} resulted in (\d+) tokens\."
    found = re.match(words, error["message"])
    assert found and int(found[1]) > 2048


def test_clients_recognise_a_prompt_beyond_the_context(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_web_pages_may_ask(plain: httpx.Client, strict: Served) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    asked = plain.options("/v1/chat/completions", headers={"Origin": "https://any.example", **ask})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "*"
    path = f"{strict.url}/chat/completions"
    assert httpx.options(path, headers={"Origin": "https://b.example", **ask}).status_code == 400
    allowed = httpx.options(path, headers={"Origin": "https://a.example", **ask})
    assert allowed.status_code == 200, "a browser asks without a key"
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    answer = httpx.get(f"{strict.url}/models", headers={"Origin": "https://a.example", "Authorization": "one"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert answer.headers["access-control-expose-headers"] == "x-request-id, x-weights-version, x-penstock-ignored"


# --- Keys and limits ------------------------------------------------------------------------------------------------


def test_keys_open(strict: Served) -> None:
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


def test_large_bodies_are_refused(strict: Served) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    fits, more = body + b" " * (20_000 - len(body)), body + b" " * (20_001 - len(body))
    assert httpx.post(f"{strict.url}/completions", content=fits, headers=KEY).status_code == 200
    error = error_of(httpx.post(f"{strict.url}/completions", content=more, headers=KEY), 413)
    assert "at most 20000 bytes" in error["message"]
    error_of(httpx.post(f"{strict.url}/completions", content=iter([more]), headers=KEY), 413)  # in chunks


def head(*lines: str, body: str = "") -> bytes:
    request = ["POST /v1/completions HTTP/1.1", "host: x", "authorization: Bearer one", *lines, "", body]
    return "\r\n".join(request).encode()


def talk(served: Served, *pieces: bytes, limit: float = 60.0) -> tuple[bytes, bool]:
    """Send the pieces and hear what comes; whether the server then closes the connection."""
    with socket.create_connection(("127.0.0.1", int(served.root.rpartition(":")[2])), timeout=limit) as made:
        heard = b""
        try:
            for piece in pieces:
                made.sendall(piece)
            while more := made.recv(2**16):
                heard += more
        except TimeoutError:
            return heard, False
        except ConnectionError:
            return heard, True
        return heard, True


def test_headers_that_grow_are_refused(strict: Served) -> None:
    heard, closed = talk(strict, head("x: " + "y" * 3000)[:-4], b"y" * 2000)
    assert heard.startswith(b"HTTP/1.1 431 ")
    assert closed


def test_headers_that_are_large_at_once_are_refused(strict: Served) -> None:
    body = '{"prompt": "x", "max_tokens": 1}'
    heard, _ = talk(strict, head("x: " + "y" * 5000, f"content-length: {len(body)}", "connection: close", body=body))
    assert heard.startswith(b"HTTP/1.1 431 ")


def test_a_silent_client_is_told(strict: Served) -> None:
    begun = time.monotonic()
    heard, _ = talk(strict, head("content-length: 100", body='{"prompt": '))
    status, _, body = heard.decode().partition("\r\n\r\n")
    assert status.startswith("HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"] == "body: nothing was received for 1 seconds"
    assert time.monotonic() - begun > 1
    heard, closed = talk(strict, head("x: y")[:-4])
    assert (heard, closed) == (b"", True), "who has not even said what he wants"


@pytest.mark.parametrize("length", [100, 100_000])
def test_a_connection_ends_where_a_body_was_given_up(strict: Served, length: int) -> None:
    _, closed = talk(strict, head(f"content-length: {length}", body='{"prompt": '))
    assert closed


def test_a_client_that_would_upgrade_is_answered(server: Served) -> None:
    """As Java's HttpClient asks, unless it is told not to."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    connection = http.client.HTTPConnection("127.0.0.1", int(server.root.rpartition(":")[2]), timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", '{"prompt": "x", "max_tokens": 1}', upgrade)
        answer = connection.getresponse()
        assert answer.status == 200 and json.load(answer)["usage"]["completion_tokens"] == 1


def test_a_connection_is_used_again(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.root.rpartition(":")[2]), timeout=60)
    with contextlib.closing(connection):
        for body in ('{"prompt": "x", "max_tokens": 1}', "{", '{"prompt": "x", "max_tokens": 1, "stream": true}') * 2:
            connection.request("POST", "/v1/completions", body)
            made = connection.sock
            answer = connection.getresponse()
            assert answer.status == (400 if body == "{" else 200)
            answer.read()
            assert connection.sock is made


def test_too_much_and_too_long_is_told() -> None:
    """``--max-concurrency`` and ``--request-timeout``."""
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
    """Two processes that speak HTTPS."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    (folder / "key.pem").write_bytes(made.private_key_pem.bytes())
    (folder / "chain.pem").write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
    files = ("--ssl-certfile", str(folder / "chain.pem"), "--ssl-keyfile", str(folder / "key.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with Served(*BLOCKS, *files, "--api-server-count", "2") as served:
        yield served, context


def test_https(secure: tuple[Served, ssl.SSLContext]) -> None:
    served, context = secure
    assert served.url.startswith("https://")
    with openai.OpenAI(base_url=served.url, api_key="none", http_client=httpx.Client(verify=context)) as client:
        chunks = client.chat.completions.create(model=MODEL, messages=OTTAWA, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "The capital of Canada is Ottawa."
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{served.root}/live")


def figures(served: Served, verify: ssl.SSLContext | bool = True) -> Counter[tuple[str, ...]]:
    """Each sample by its name and its labels but for the model's."""
    text = httpx.get(f"{served.root}/metrics", verify=verify).text
    found: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for label, value in sorted(sample.labels.items()) if label != "model_name"]
            found[sample.name.removeprefix("penstock:"), *labels] = sample.value
    return found


def measured(served: Served, client: httpx.Client, verify: ssl.SSLContext | bool = True) -> None:
    """Ask in several ways; then the page must have counted just that."""
    before = figures(served, verify)
    tokens: Counter[str] = Counter()
    for _ in range(6):
        for body in ({"prompt": "The sea", "max_tokens": 5, "n": 2}, {"prompt": ["One", "Two words"], "max_tokens": 3}):
            usage = client.post("/v1/completions", json=body | {"ignore_eos": True}).json()["usage"]
            tokens += Counter({name: usage[f"{name}_tokens"] for name in ("prompt", "completion")})
        error_of(client.post("/v1/completions", json={"prompt": "x" * 5000}), 400)
        error_of(client.post("/v1/completions", json={"prompt": "x", "top_p": 2}), 400)
    grown = figures(served, verify)
    grown.subtract(before)
    assert grown["prompt_tokens_total",] == tokens["prompt"]
    assert grown["generation_tokens_total",] == tokens["completion"]
    assert grown["request_success_total", "length"] == 6 * 4
    assert grown["request_failures_total", "too_long"] == grown["request_failures_total", "invalid"] == 6
    assert grown["http_responses_total", "/v1/completions", "200"] == 6 * 2
    assert grown["http_responses_total", "/v1/completions", "400"] == 6 * 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grown[f"{name}_seconds_count",] == 6 * 3
        assert grown[f"{name}_seconds_bucket", "+Inf"] == 6 * 3
    assert grown["request_prompt_tokens_sum",] == tokens["prompt"]
    assert grown["request_generation_tokens_sum",] == tokens["completion"]
    assert grown["num_requests_open",] == 0


def test_metrics_count_what_was_asked(server: Served, plain: httpx.Client) -> None:
    measured(server, plain)


def test_one_page_tells_of_both_processes(secure: tuple[Served, ssl.SSLContext]) -> None:
    served, context = secure
    with httpx.Client(base_url=served.root, verify=context, headers={"connection": "close"}) as client:
        measured(served, client, context)
    told = [re.match(r"\S+ \S+ (api-\d):", line) for line in served.lines if "POST /v1/completions" in line]
    assert {match[1] for match in told if match} == {"api-0", "api-1"}, "both have answered"
    pages = [figures(served, context)["http_responses_total", "/v1/completions", "200"] for _ in range(8)]
    assert len(set(pages)) == 1


def test_a_log_in_json(strict: Served) -> None:
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


# --- Starting -------------------------------------------------------------------------------------------------------


def test_who_is_ready_answers() -> None:
    served = Served(*BLOCKS)
    try:
        served.start()
        answer = httpx.post(f"{served.url}/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
        assert answer.status_code == 200, answer.text
    finally:
        served.kill()


def stopped(*arguments: str) -> str:
    """The one sentence that a server says whose start ends once it has started."""
    said = subprocess.run([*SERVE, *BLOCKS, *arguments], capture_output=True, text=True, timeout=60)
    assert said.returncode == 2, said.stderr
    (sentence,) = said.stderr.splitlines()
    return sentence


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        sentence = stopped("--host", "127.0.0.1", "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}" in sentence


def test_a_model_that_is_not_there() -> None:
    assert "/nowhere does not exist" in usage_error("/nowhere")


def test_an_unknown_name_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("max_num_seq: 5\n")
    sentence = f"penstock serve: max_num_seq: no such option, in {file}; did you mean max_num_seqs?\n"
    assert usage_error("--config", str(file)) == sentence


def test_a_wrong_value_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "0")
    sentence = usage_error()
    assert "max_num_seqs" in sentence and "PENSTOCK_MAX_NUM_SEQS" in sentence


def test_an_unknown_flag() -> None:
    assert usage_error("--prot", "1") == "penstock serve: unknown argument --prot; did you mean --port?\n"


def test_a_key_without_a_certificate() -> None:
    assert "ssl_certfile" in stopped("--port", "0", "--ssl-keyfile", __file__)


@pytest.mark.parametrize(
    ("option", "words"),
    [("--ssl-certfile", "ssl_certfile"), ("--chat-template", "chat_template"), ("--tokenizer", "tokenizer")],
)
def test_a_file_that_is_none(option: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if option == "--ssl-certfile":
        file.write_text("no certificate")
    assert words in stopped("--port", "0", option, str(file))


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_broken_checkpoint(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo.CHAT, model)
    (model / name).write_text("{")
    assert str(model) in stopped("--port", "0", str(model))
