"""Ports besides the one for requests, and dialects that share paths."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest
import tritonclient.grpc as triton
from serving import START_TIMEOUT, Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "100", "--health-port", "0", "--metrics-port", "0") as served:
        yield served


def test_health_and_metrics_have_ports_of_their_own(served: Served) -> None:
    others = [found[1] for line in served.lines if (found := re.search(r"health and metrics at (\S+)", line))]
    assert len(set(others)) == 2 and served.root not in others
    for root in others:
        for path in ("/health", "/ready", "/live", "/version"):
            assert httpx.get(root + path).status_code == 200, path
        assert "penstock:num_requests_open" in httpx.get(f"{root}/metrics").text
        for path in ("/v1/models", "/v1/completions", "/nothing"):
            refused = httpx.post(root + path, json={"prompt": "x"})
            assert refused.status_code == 404 and "only health and metrics" in refused.json()["error"]["message"]


def test_http_can_be_off_where_grpc_is() -> None:
    """Then health and metrics answer on their own ports, if they have any."""
    off = Served("--port", "-1", "--grpc-port", "0", "--num-gpu-blocks-override", "40", "--health-port", "0")
    try:
        off.find("ready: penstock-demo without HTTP", limit=START_TIMEOUT)
        health = off.find(r"health and metrics at (\S+)")[1]
        assert httpx.get(f"{health}/v2/health/ready").status_code == 200
        assert httpx.get(f"{health}/v1/models").status_code == 404
        with triton.InferenceServerClient(off.find(r"gRPC at (\S+)")[1]) as client:
            assert client.is_model_ready("ensemble")
        off.terminate()
        assert off.ended() == 0
    finally:
        off.kill()
    deaf = Served("--port", "-1")
    assert deaf.ended() == 2
    assert "port: is -1 (no HTTP) without grpc_port" in deaf.lines[-1]


def test_a_base_url_that_is_a_path_finds_its_way(served: Served) -> None:
    """As PaddleNLP's document has it."""
    odd = openai.OpenAI(base_url=f"{served.url}/chat/completions", api_key="none")
    usual = openai.OpenAI(base_url=served.url, api_key="none")
    asked = {"model": "default", "prompt": "Hello, how are you?", "max_tokens": 5, "temperature": 0}
    assert odd.completions.create(**asked).choices == usual.completions.create(**asked).choices
    messages = [{"role": "user", "content": "Hello, who are you"}]
    chat = {"model": "default", "messages": messages, "max_tokens": 5, "temperature": 0}
    assert odd.chat.completions.create(**chat).choices == usual.chat.completions.create(**chat).choices
