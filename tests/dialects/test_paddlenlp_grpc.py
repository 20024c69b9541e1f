"""PaddleNLP's gRPC protocol, used with Triton's streaming client as by PaddleNLP's client, and compared with HTTP."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from serving import Served
from storm import wait_until_idle

BODY: dict[str, Any] = {"text": "Once upon a time", "temperature": 0, "max_dec_len": 12}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--grpc-port", "0", "--num-gpu-blocks-override", "200") as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.find(r"gRPC at (\S+)")[1]) as client:
        yield client


def tensor(content: bytes) -> triton.InferInput:
    return triton.InferInput("IN", [1], "BYTES").set_data_from_numpy(np.array([content], dtype=object))


def stream_chunks(client: triton.InferenceServerClient, content: bytes) -> list[dict[str, Any]]:
    """Stream one request; return its chunks, including the last."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer("model", [tensor(content)], request_id="1")
        chunks: list[dict[str, Any]] = []
        while not chunks or not (chunks[-1].get("is_end") or chunks[-1].get("error_msg")):
            result, error = answers.get(timeout=60)
            assert error is None, error
            (chunk,) = json.loads(result.as_numpy("OUT")[0])
            chunks.append(chunk)
        return chunks
    finally:
        client.stop_stream()


def text_and_ids(chunks: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Return the concatenated text and token ids of all chunks."""
    return "".join(chunk["token"] for chunk in chunks), [token for chunk in chunks for token in chunk["token_ids"]]


@pytest.mark.row("paddlenlp", "model", "IN", "OUT")
def test_stream_chunks_equal_http_answer(served: Served, client: triton.InferenceServerClient) -> None:
    chunks = stream_chunks(client, json.dumps([BODY | {"req_id": "a", "return_usage": True}]).encode())
    assert [chunk["send_idx"] for chunk in chunks] == list(range(len(chunks)))
    assert {chunk["req_id"] for chunk in chunks} == {"a"}
    assert [chunk["is_end"] for chunk in chunks] == [0] * (len(chunks) - 1) + [1]
    assert not any("error_msg" in chunk for chunk in chunks)
    whole = requests.post(f"{served.url}/completions", json=BODY | {"return_usage": True}, timeout=60).json()
    assert "".join(chunk["token"] for chunk in chunks) == whole["result"]
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.row("paddlenlp", "stream")
def test_stream_field_is_ignored_and_default_fields_are_accepted(client: triton.InferenceServerClient) -> None:
    request = {
        "max_dec_len": 12, "min_dec_len": 1, "topp": 0.0, "temperature": 0.95, "frequency_score": 0.0,
        "penalty_score": 1.0, "presence_score": 0.0, "req_id": "theirs", "response_timeout": 120, "text": BODY["text"],
    }  # fmt: skip
    chunks = stream_chunks(client, json.dumps([request | {"stream": False}]).encode())
    for other in (request | {"stream": True}, BODY):
        assert text_and_ids(stream_chunks(client, json.dumps([other]).encode())) == text_and_ids(chunks)


def test_concurrent_streams_equal_sequential_streams(served: Served, client: triton.InferenceServerClient) -> None:
    texts = [f"Once upon a time there were {count} foxes" for count in range(2, 26)]
    alone = [stream_chunks(client, json.dumps([BODY | {"text": text}]).encode()) for text in texts]

    async def ask() -> list[list[dict[str, Any]]]:
        async with triton_aio.InferenceServerClient(served.find(r"gRPC at (\S+)")[1]) as async_client:

            async def ask_one(text: str) -> list[dict[str, Any]]:
                async def requests() -> AsyncIterator[dict[str, Any]]:
                    yield {"model_name": "model", "inputs": [tensor(json.dumps([BODY | {"text": text}]).encode())]}

                chunks: list[dict[str, Any]] = []
                async for result, error in async_client.stream_infer(requests()):
                    assert error is None, error
                    chunks += json.loads(result.as_numpy("OUT")[0])
                return chunks

            return await asyncio.gather(*map(ask_one, texts))

    assert [text_and_ids(chunks) for chunks in asyncio.run(ask())] == [text_and_ids(chunks) for chunks in alone]


def test_cancelled_stream_frees_req_id_and_kv_blocks(served: Served, client: triton.InferenceServerClient) -> None:
    """PaddleNLP's client cancels streams in this way."""
    endless = BODY | {"req_id": "mine", "min_dec_len": 1500, "max_dec_len": 1500}
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer("model", [tensor(json.dumps([endless]).encode())], request_id="1")
    result, error = answers.get(timeout=60)
    assert error is None and json.loads(result.as_numpy("OUT")[0])[0]["req_id"] == "mine"
    (refused,) = requests.post(f"{served.url}/completions", json=BODY | {"req_id": "mine"}, timeout=60).iter_lines()
    assert json.loads(refused)["error_msg"].startswith("req_id: 'mine' already exists")
    client.stop_stream(cancel_requests=True)
    waiting = threading.Event()
    while "error_msg" in stream_chunks(client, json.dumps([BODY | {"req_id": "mine", "max_dec_len": 1}]).encode())[-1]:
        assert not waiting.wait(0.01)  # until the engine has noticed the disconnect
    asyncio.run(wait_until_idle(served))


def test_unary_call_returns_whole_answer(client: triton.InferenceServerClient) -> None:
    answer = client.infer("model", [tensor(json.dumps([BODY]).encode())])
    (result,) = json.loads(answer.as_numpy("OUT")[0])
    assert result["is_end"] == 1
    assert result["token"] == "".join(p["token"] for p in stream_chunks(client, json.dumps([BODY]).encode()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "IN: is not JSON"),
        (b"[]", "IN: must be a list with one request"),
        (json.dumps([{"prompt": "a"}]).encode(), "text: is missing; give text, messages or input_ids"),
        (b"\xff", "IN: is not JSON"),
        (json.dumps([BODY | {"max_dec_len": 10**6, "req_id": "b"}]).encode(), "max_dec_len"),
    ],
)
def test_invalid_request_is_reported_in_answer(
    client: triton.InferenceServerClient, content: bytes, message: str
) -> None:
    (answer,) = stream_chunks(client, content)
    assert message in answer["error_msg"] and answer["error_code"]
