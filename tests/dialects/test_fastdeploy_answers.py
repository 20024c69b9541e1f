"""Fields of FastDeploy's answers. Whole answers have all fields (null if unset); stream chunks have only set fields."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served

CHAT = {"messages": [{"role": "user", "content": "What is the capital of Canada?"}]}
PROMPT = {"prompt": "The capital of Canada"}
ANSWER = "id object created model choices usage"
MESSAGE = "role content multimodal_content reasoning_content audio_content tool_calls"
IDS = "prompt_token_ids completion_token_ids prompt_tokens completion_tokens"
WHOLE = {
    "chat/completions": "index message logprobs draft_logprobs prompt_logprobs finish_reason speculate_metrics",
    "completions": f"index text {IDS} arrival_time logprobs draft_logprobs prompt_logprobs reasoning_content"
    " finish_reason tool_calls speculate_metrics",
}
"""Fields of a choice in a whole answer."""
CHUNK = {
    "chat/completions": "index delta logprobs draft_logprobs arrival_time speculate_metrics",
    "completions": "index text prompt_token_ids completion_token_ids tool_calls completion_tokens reasoning_content"
    " arrival_time logprobs prompt_logprobs draft_logprobs speculate_metrics",
}
"""Fields of a choice in a stream chunk. Only the last chunk also has ``finish_reason``."""
FIRST_DELTA = "role content reasoning_content tool_calls prompt_token_ids completion_token_ids"
DELTA = "content reasoning_content tool_calls prompt_token_ids completion_token_ids completion_tokens"
FIRST_COMPLETION = "index text prompt_token_ids prompt_logprobs prompt_tokens completion_token_ids"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("fastdeploy") / "log"
    flags = f"--compat fastdeploy --enable-logprob --metrics-port 0 --num-gpu-blocks-override 172 --log-file {log}"
    with Served(*flags.split()) as served:
        yield served


def post(served: Served, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    found = httpx.post(f"{served.url}/{path}", json=body)
    assert found.status_code == status, found.text
    return dict(found.json())


def stream(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{served.url}/{path}", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.status_code == 200 and lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def null(document: dict[str, Any]) -> set[str]:
    return {name for name, value in document.items() if value is None}


def fields(names: str) -> set[str]:
    return set(names.split())


@pytest.mark.parametrize(("path", "with_ids", "logprobs"), itertools.product(WHOLE, (False, True), (False, True)))
def test_whole_answer_has_all_fields(served: Served, path: str, with_ids: bool, logprobs: bool) -> None:
    chat = path == "chat/completions"
    body: dict[str, Any] = {**(CHAT if chat else PROMPT), "temperature": 0, "max_tokens": 6}
    body |= {"return_token_ids": True} if with_ids else {}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1} if chat else {"logprobs": 2}
    answer = post(served, path, body)
    assert answer.keys() == fields(ANSWER)
    (choice,) = answer["choices"]
    assert choice.keys() == fields(WHOLE[path])
    assert (choice["logprobs"] is not None) == logprobs
    holder = choice["message"] if chat else choice
    if chat:
        assert holder.keys() == fields(f"{MESSAGE} {IDS}")
        if logprobs:
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            assert len(top) == 2 and all(entry["top_logprobs"] is None for entry in top)
            assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert null(holder).isdisjoint(fields(IDS)) if with_ids else null(holder) >= fields(IDS)
    if with_ids:
        assert len(holder["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
        assert len(holder["completion_token_ids"]) == answer["usage"]["completion_tokens"]
        prompt = CHAT["messages"][0]["content"] if chat else PROMPT["prompt"]
        assert prompt in holder["prompt_tokens"]
        assert (choice["message"]["content"] if chat else choice["text"]) in holder["completion_tokens"]
    usage = answer["usage"]
    assert usage.keys() == fields(
        "prompt_tokens total_tokens completion_tokens prompt_tokens_details completion_tokens_details"
    )
    media = 0 if chat else None
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": media, "video_tokens": media}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0, "image_tokens": 0}


@pytest.mark.row("fastdeploy", "stream_options")
@pytest.mark.parametrize(("path", "with_ids", "logprobs"), itertools.product(CHUNK, (False, True), (False, True)))
def test_chunks_have_fields_that_fastdeploy_sets(served: Served, path: str, with_ids: bool, logprobs: bool) -> None:
    chat = path == "chat/completions"
    body: dict[str, Any] = {**(CHAT if chat else PROMPT), "temperature": 0, "max_tokens": 6}
    body |= {"return_token_ids": True} if with_ids else {}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    whole = post(served, path, body)["choices"][0]
    *chunks, last = stream(served, path, body | {"stream_options": {}})
    assert last["choices"] == [] and last["usage"]["total_tokens"] > 0, "include_usage is true by default"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all("usage" not in chunk for chunk in chunks)
    if chat:
        first = choices.pop(0)
        assert first.keys() == fields("index delta prompt_logprobs")
        assert first["delta"].keys() == fields(FIRST_DELTA) | (fields("prompt_tokens") if with_ids else set())
        assert (first["delta"]["role"], first["delta"]["content"]) == ("assistant", "")
        assert first["delta"]["completion_token_ids"] is None
        prompt = first["delta"]
    elif with_ids:
        prompt = choices.pop(0)
        assert prompt.keys() == fields(FIRST_COMPLETION) and prompt["text"] == ""
    for choice in choices[:-1]:
        assert choice.keys() == fields(CHUNK[path])
    assert choices[-1].keys() == fields(CHUNK[path]) | {"finish_reason"}
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    arrivals = [choice["arrival_time"] for choice in choices]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    deltas = [choice["delta"] if chat else choice for choice in choices]
    if chat:
        assert all(delta.keys() == fields(DELTA) for delta in deltas)
    text = "".join(delta["content" if chat else "text"] for delta in deltas)
    holder = whole["message"] if chat else whole
    assert text == holder["content" if chat else "text"]
    if with_ids:
        assert prompt["prompt_token_ids"] == holder["prompt_token_ids"]
        assert prompt["prompt_tokens"] == holder["prompt_tokens"]
        assert [token_id for delta in deltas for token_id in delta["completion_token_ids"]] == holder[
            "completion_token_ids"
        ]
        assert "".join(delta["completion_tokens"] for delta in deltas) == holder["completion_tokens"]
    else:
        assert all(null(delta) >= fields("completion_token_ids completion_tokens") for delta in deltas)


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("model", ["", "ERNIE-4.5", "!@#", "default", None])
def test_model_field_is_ignored_by_default(served: Served, path: str, model: str | None) -> None:
    body = {**CHAT, **PROMPT} if path == "completions" else CHAT
    answer = post(served, path, {**body, "model": model, "max_tokens": 2})
    assert answer["model"] == served.name


def test_model_field_is_checked_with_served_model_name(tmp_path: Path) -> None:
    flags = "--compat fastdeploy --metrics-port 0 --num-gpu-blocks-override 64 --served-model-name ernie --log-file"
    with Served(*flags.split(), str(tmp_path / "log")) as served:
        refused = post(served, "chat/completions", {**CHAT, "model": "another"}, 404)["error"]
        assert (refused["param"], refused["code"]) == ("model", "model_not_support")
        assert post(served, "completions", {**PROMPT, "model": "default", "max_tokens": 1})["model"] == "ernie"


@pytest.mark.parametrize(
    ("path", "wrong", "param", "code"),
    [
        ("chat/completions", {"max_tokens": 3}, "messages", "missing_required_parameter"),
        ("chat/completions", {"messages": "text"}, "messages", "missing_required_parameter"),
        ("chat/completions", {**CHAT, "top_p": 1.5}, "top_p", "invalid_value"),
        ("completions", {"prompt": "word " * 3000}, "prompt", "context_length_exceeded"),
    ],
)
def test_invalid_request_gets_fastdeploy_error_code(
    served: Served, path: str, wrong: dict[str, Any], param: str, code: str
) -> None:
    error = post(served, path, wrong, 400)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_metadata_supplies_missing_parameters(served: Served) -> None:
    body: dict[str, Any] = {**CHAT, "temperature": 0, "return_token_ids": True}

    def tokens(**more: Any) -> int:
        return int(post(served, "chat/completions", {**body, **more})["usage"]["completion_tokens"])

    assert tokens(metadata={"max_tokens": 3}) == 3
    assert tokens(max_tokens=2, metadata={"max_tokens": 3, "n": 2.5, "of": {"mine": None}}) == 2
    longer = tokens(metadata={"min_tokens": 40, "max_tokens": 60})
    assert longer >= 40 > tokens(metadata={})
    prompts = [
        post(served, "chat/completions", {**body, "max_tokens": 1, **more})["choices"][0]["message"]["prompt_tokens"]
        for more in (
            {"metadata": {"enable_thinking": True}},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"metadata": {"enable_thinking": True}, "chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        )
    ]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    refused = post(served, "chat/completions", {**CHAT, "metadata": {"raw_request": False}}, 400)
    assert "raw_request" in refused["error"]["message"]


@pytest.mark.row("fastdeploy", "fields of chats in completions")
def test_neutral_values_are_accepted(served: Served) -> None:
    plain = {**PROMPT, "max_tokens": 4, "temperature": 0}
    expected = post(served, "completions", plain | {"logprobs": 1})["choices"]
    neutral = {"stop": "", "bad_words": ["", "zebra"], "top_logprobs": 5, "logprobs": True}
    found = httpx.post(f"{served.url}/completions", json=plain | neutral)
    assert found.json()["choices"] == expected
    assert post(served, "completions", plain | {"stop": [""], "bad_words": [], "logprobs": 1})["choices"] == expected
    assert found.headers["x-penstock-ignored"] == "top_logprobs"


def test_openai_client_reads_fastdeploy_answers(served: Served) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none")
    fields: Any = {"model": "default", **CHAT, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert whole.choices[0].message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
