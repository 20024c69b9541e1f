"""PaddleNLP's model over gRPC, asked as its own client does: by Triton's client, in a stream."""

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

ASKED: dict[str, Any] = {"text": "Once upon a time", "temperature": 0, "max_dec_len": 12}


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


def told(client: triton.InferenceServerClient, content: bytes) -> list[dict[str, Any]]:
    """All that comes of one request, up to the piece that says it is the last."""
    news: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: news.put((result, error)))
    try:
        client.async_stream_infer("model", [tensor(content)], request_id="1")
        pieces: list[dict[str, Any]] = []
        while not pieces or not (pieces[-1].get("is_end") or pieces[-1].get("error_msg")):
            result, error = news.get(timeout=60)
            assert error is None, error
            (piece,) = json.loads(result.as_numpy("OUT")[0])
            pieces.append(piece)
        return pieces
    finally:
        client.stop_stream()


def joined(pieces: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Text and token ids, in however many pieces they came."""
    return "".join(piece["token"] for piece in pieces), [token for piece in pieces for token in piece["token_ids"]]


@pytest.mark.row("paddlenlp", "model", "IN", "OUT")
def test_pieces_are_those_of_http(served: Served, client: triton.InferenceServerClient) -> None:
    pieces = told(client, json.dumps([ASKED | {"req_id": "a", "return_usage": True}]).encode())
    assert [piece["send_idx"] for piece in pieces] == list(range(len(pieces)))
    assert {piece["req_id"] for piece in pieces} == {"a"}
    assert [piece["is_end"] for piece in pieces] == [0] * (len(pieces) - 1) + [1]
    assert not any("error_msg" in piece for piece in pieces)
    whole = requests.post(f"{served.url}/completions", json=ASKED | {"return_usage": True}, timeout=60).json()
    assert "".join(piece["token"] for piece in pieces) == whole["result"]
    assert pieces[-1]["usage"] == whole["usage"]


@pytest.mark.row("paddlenlp", "stream")
def test_stream_means_nothing_and_what_paddlenlp_s_client_sends_is_taken(client: triton.InferenceServerClient) -> None:
    theirs = {
        "max_dec_len": 12, "min_dec_len": 1, "topp": 0.0, "temperature": 0.95, "frequency_score": 0.0,
        "penalty_score": 1.0, "presence_score": 0.0, "req_id": "theirs", "response_timeout": 120, "text": ASKED["text"],
    }  # fmt: skip
    pieces = told(client, json.dumps([theirs | {"stream": False}]).encode())
    for other in (theirs | {"stream": True}, ASKED):
        assert joined(told(client, json.dumps([other]).encode())) == joined(pieces)


def test_many_streams_at_once_are_answered_each_by_itself(served: Served, client: triton.InferenceServerClient) -> None:
    texts = [f"Once upon a time there were {count} foxes" for count in range(2, 26)]
    alone = [told(client, json.dumps([ASKED | {"text": text}]).encode()) for text in texts]

    async def ask() -> list[list[dict[str, Any]]]:
        async with triton_aio.InferenceServerClient(served.find(r"gRPC at (\S+)")[1]) as many:

            async def one(text: str) -> list[dict[str, Any]]:
                async def requests() -> AsyncIterator[dict[str, Any]]:
                    yield {"model_name": "model", "inputs": [tensor(json.dumps([ASKED | {"text": text}]).encode())]}

                pieces: list[dict[str, Any]] = []
                async for result, error in many.stream_infer(requests()):
                    assert error is None, error
                    pieces += json.loads(result.as_numpy("OUT")[0])
                return pieces

            return await asyncio.gather(*map(one, texts))

    assert [joined(pieces) for pieces in asyncio.run(ask())] == [joined(pieces) for pieces in alone]


def test_a_client_that_leaves_gives_its_id_and_its_blocks_back(
    served: Served, client: triton.InferenceServerClient
) -> None:
    """As PaddleNLP's own client leaves."""
    endless = ASKED | {"req_id": "mine", "min_dec_len": 1500, "max_dec_len": 1500}
    news: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: news.put((result, error)))
    client.async_stream_infer("model", [tensor(json.dumps([endless]).encode())], request_id="1")
    result, error = news.get(timeout=60)
    assert error is None and json.loads(result.as_numpy("OUT")[0])[0]["req_id"] == "mine"
    (refused,) = requests.post(f"{served.url}/completions", json=ASKED | {"req_id": "mine"}, timeout=60).iter_lines()
    assert json.loads(refused)["error_msg"].startswith("req_id: 'mine' already exists")
    client.stop_stream(cancel_requests=True)
    waiting = threading.Event()
    while "error_msg" in told(client, json.dumps([ASKED | {"req_id": "mine", "max_dec_len": 1}]).encode())[-1]:
        assert not waiting.wait(0.01)  # the engine has yet to hear that the client disconnected
    asyncio.run(wait_until_idle(served))


def test_whoever_asks_for_one_answer_gets_it_whole(client: triton.InferenceServerClient) -> None:
    answer = client.infer("model", [tensor(json.dumps([ASKED]).encode())])
    (piece,) = json.loads(answer.as_numpy("OUT")[0])
    assert piece["is_end"] == 1
    assert piece["token"] == "".join(p["token"] for p in told(client, json.dumps([ASKED]).encode()))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "IN: is not JSON"),
        (b"[]", "IN: must be a list with one request"),
        (json.dumps([{"prompt": "a"}]).encode(), "text: is missing; give text, messages or input_ids"),
        (b"\xff", "IN: is not JSON"),
        (json.dumps([ASKED | {"max_dec_len": 10**6, "req_id": "b"}]).encode(), "max_dec_len"),
    ],
)
def test_what_is_wrong_is_told_in_the_answer(client: triton.InferenceServerClient, content: bytes, named: str) -> None:
    (piece,) = told(client, content)
    assert named in piece["error_msg"] and piece["error_code"]
