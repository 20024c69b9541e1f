"""All dialects on one server: equal answers, errors in each dialect's format, and no leaks after disconnects."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from serving import Served
from storm import eventually, read_metrics

PROMPT, TOKENS = "The story of a fox:", 14
QUESTION = [{"role": "user", "content": "What is the capital of Canada?"}]
BARE = {"Authorization": "TOKEN"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--grpc-port", "0", "--exclude-input-in-output", "--api-server-count", "2")
    with Served("--num-gpu-blocks-override", "300", *flags) as served:
        yield served


def grpc_of(served: Served) -> str:
    return served.find(r"gRPC at (\S+)")[1]


def post(served: Served, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    answer = httpx.post(served.root + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tensors(module: Any, inputs: dict[str, tuple[str, Any]]) -> list[Any]:
    kinds = {"BYTES": object, "INT32": np.int32, "FP32": np.float32, "BOOL": bool}
    result = []
    for name, (kind, value) in inputs.items():
        array = np.array([[value.encode() if isinstance(value, str) else value]], dtype=kinds[kind])
        result.append(module.InferInput(name, list(array.shape), kind).set_data_from_numpy(array))
    return result


ENSEMBLE = {"text_input": ("BYTES", PROMPT), "max_tokens": ("INT32", TOKENS), "temperature": ("FP32", 0.0)}


def kserve_http(served: Served) -> str:
    with triton_http.InferenceServerClient(served.root.removeprefix("http://")) as client:
        found = client.infer("ensemble", tensors(triton_http, ENSEMBLE)).as_numpy("text_output")
    return str(found.flatten()[0].decode())


def kserve_grpc(served: Served) -> str:
    with triton.InferenceServerClient(grpc_of(served)) as client:
        found = client.infer("ensemble", tensors(triton, ENSEMBLE)).as_numpy("text_output")
    return str(found.flatten()[0].decode())


def paddle_grpc(served: Served, input_ids: list[int]) -> dict[str, Any]:
    request = {"input_ids": input_ids, "max_dec_len": TOKENS, "temperature": 0}
    tensor = triton.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([json.dumps([request]).encode()], dtype=object))
    with triton.InferenceServerClient(grpc_of(served)) as client:
        (found,) = json.loads(client.infer("model", [tensor]).as_numpy("OUT")[0])
    return dict(found)


def test_all_dialects_return_same_completion(served: Served) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    openai_choice = post(served, "/v1/completions", **greedy, return_token_ids=True)["choices"][0]
    prompt_ids, ids, text = openai_choice["prompt_token_ids"], openai_choice["token_ids"], openai_choice["text"]
    assert len(ids) == TOKENS and text
    assert post(served, "/v1/completions", BARE, **greedy)["choices"][0]["text"] == text  # BladeLLM's dialect
    assert post(served, "/generate", **greedy)["text"] == [PROMPT + text]  # vLLM's dialect
    native = {"max_dec_len": TOKENS, "temperature": 0}
    assert post(served, "/v1/completions", **native, input_ids=prompt_ids)["result"] == text  # PaddleNLP's dialect
    over_grpc = paddle_grpc(served, prompt_ids)
    assert (over_grpc["token"], over_grpc["token_ids"]) == (text, ids)
    triton_request = {"text_input": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    assert post(served, "/v2/models/ensemble/generate", **triton_request)["text_output"] == text
    assert kserve_http(served) == kserve_grpc(served) == text
    ids_request = {
        "inputs": [
            {"name": "input_ids", "datatype": "INT32", "shape": [1, len(prompt_ids)], "data": prompt_ids},
            {"name": "input_lengths", "datatype": "INT32", "shape": [1, 1], "data": [len(prompt_ids)]},
            {"name": "request_output_len", "datatype": "INT32", "shape": [1, 1], "data": [TOKENS]},
            {"name": "temperature", "datatype": "FP32", "shape": [1, 1], "data": [0.0]},
        ]
    }
    outputs = {
        out["name"]: out["data"] for out in post(served, "/v2/models/tensorrt_llm/infer", **ids_request)["outputs"]
    }
    assert outputs["output_ids"][-TOKENS:] == ids


def test_all_dialects_return_same_chat_answer(served: Served) -> None:
    greedy = {"model": "default", "temperature": 0}
    text = post(served, "/v1/chat/completions", **greedy, max_tokens=60, messages=QUESTION)["choices"][0]["message"]
    content = text["content"]
    assert "Ottawa" in content
    blade = post(served, "/v1/chat/completions", BARE, **greedy, max_tokens=60, messages=QUESTION)
    assert blade["choices"][0]["message"]["content"] == content
    anthropic = post(served, "/v1/messages", **greedy, max_tokens=60, messages=QUESTION)
    assert anthropic["content"] == [{"type": "text", "text": content}]
    response = post(served, "/v1/responses", **greedy, max_output_tokens=60, input=QUESTION)
    assert response["output"][-1]["content"][0]["text"] == content
    native = {"max_dec_len": 60, "temperature": 0, "messages": QUESTION}
    assert post(served, "/v1/chat/completions", **native)["result"] == content


WRONG: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "OpenAI": ("/v1/completions", {}, {"prompt": "x", "top_p": 7}, "error.message"),
    "vLLM": ("/generate", {}, {"prompt": "x", "top_p": 7}, ""),
    "BladeLLM": ("/v1/completions", BARE, {"prompt": "x", "top_p": 7}, "error_info.message"),
    "PaddleNLP": ("/v1/completions", {}, {"text": "x", "topp": 7}, "error_msg"),
    "Triton": ("/v2/models/ensemble/generate", {}, {"text_input": "x", "max_tokens": 4, "top_p": 7.0}, "error"),
    "Anthropic": ("/v1/messages", {}, {"max_tokens": 4, "messages": QUESTION, "top_p": 7}, "error.message"),
    "Responses": ("/v1/responses", {}, {"input": "x", "top_p": 7}, "error.message"),
}
"""By dialect: path, headers, invalid body, and dotted path of the message in the error response."""


@pytest.mark.parametrize("name", WRONG)
def test_error_has_format_of_dialect(served: Served, name: str) -> None:
    path, headers, body, where = WRONG[name]
    answer = httpx.post(served.root + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == (200 if name == "PaddleNLP" else 400)  # PaddleNLP's errors have HTTP status 200
    message = answer.json()
    for key in filter(None, where.split(".")):
        message = message[key]
    assert re.search("top_?p", str(message))
    broken = httpx.post(served.root + path, content=b"{", headers=headers, timeout=60)
    assert broken.status_code == 400 and "JSON" in broken.text


LONG = {"max_tokens": 900, "ignore_eos": True, "stream": True}
STREAMS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "OpenAI": ("/v1/completions", {}, {"prompt": PROMPT, **LONG}),
    "chat": ("/v1/chat/completions", {}, {"messages": QUESTION, **LONG}),
    "vLLM": ("/generate", {}, {"prompt": PROMPT, **LONG}),
    "BladeLLM": ("/v1/completions", BARE, {"prompt": PROMPT, **LONG}),
    "PaddleNLP": ("/v1/completions", {}, {"text": PROMPT, "min_dec_len": 900, "max_dec_len": 900, "stream": True}),
    "Triton": (
        "/v2/models/ensemble/generate_stream", {},
        {"text_input": PROMPT, "max_tokens": 900, "min_length": 900, "stream": True},
    ),
    "Anthropic": ("/v1/messages", {}, {"max_tokens": 900, "messages": QUESTION, "stream": True}),
    "Responses": ("/v1/responses", {}, {"input": "x", "max_output_tokens": 900, "ignore_eos": True, "stream": True}),
}  # fmt: skip


async def leave_http(served: Served, client: httpx.AsyncClient, name: str, after: int) -> None:
    path, headers, body = STREAMS[name]
    async with client.stream("POST", served.root + path, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_bytes():
            after -= 1
            if after < 0:
                return


async def leave_grpc(served: Served, after: int) -> None:
    inputs = ENSEMBLE | {"max_tokens": ("INT32", 900), "min_length": ("INT32", 900), "stream": ("BOOL", True)}

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "ensemble", "inputs": tensors(triton_aio, inputs)}

    async with triton_aio.InferenceServerClient(grpc_of(served)) as client:
        stream = client.stream_infer(requests())
        async for _, error in stream:
            assert error is None
            after -= 1
            if after < 0:
                stream.cancel()
                return


def test_disconnected_clients_of_all_dialects_free_kv_blocks(served: Served) -> None:
    rng = random.Random(0)

    async def storm() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            leaving: list[Callable[[], Awaitable[None]]] = []
            for _ in range(60):
                name, after = rng.choice([*STREAMS, "gRPC"]), rng.choice((0, 1, 5, 20))
                if name == "gRPC":
                    leaving.append(lambda after=after: leave_grpc(served, after))  # type: ignore[misc]
                else:
                    leaving.append(lambda name=name, after=after: leave_http(served, client, name, after))  # type: ignore[misc]
            await asyncio.gather(*(leave() for leave in leaving))

        async def quiet() -> None:
            found = await read_metrics(served)
            assert (found["penstock:num_requests_open"], found["penstock:kv_cache_usage_perc"]) == (0, 0)

        await eventually(quiet, 30)

    asyncio.run(storm())
    test_all_dialects_return_same_completion(served)
