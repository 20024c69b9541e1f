"""Separate health and metrics ports, servers without HTTP, and base URLs that include an endpoint's path."""

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


def test_health_and_metrics_ports_serve_nothing_else(served: Served) -> None:
    others = [found[1] for line in served.lines if (found := re.search(r"health and metrics at (\S+)", line))]
    assert len(set(others)) == 2 and served.root not in others
    for root in others:
        for path in ("/health", "/ready", "/live", "/version"):
            assert httpx.get(root + path).status_code == 200, path
        assert "penstock:num_requests_open" in httpx.get(f"{root}/metrics").text
        for path in ("/v1/models", "/v1/completions", "/nothing"):
            refused = httpx.post(root + path, json={"prompt": "x"})
            assert refused.status_code == 404 and "only health and metrics" in refused.json()["error"]["message"]


def test_http_can_be_disabled_only_with_grpc() -> None:
    """Without HTTP, health and metrics are still served on their separate ports."""
    grpc_only = Served("--port", "-1", "--grpc-port", "0", "--num-gpu-blocks-override", "40", "--health-port", "0")
    try:
        grpc_only.find("ready: penstock-demo without HTTP", limit=START_TIMEOUT)
        health = grpc_only.find(r"health and metrics at (\S+)")[1]
        assert httpx.get(f"{health}/v2/health/ready").status_code == 200
        assert httpx.get(f"{health}/v1/models").status_code == 404
        with triton.InferenceServerClient(grpc_only.find(r"gRPC at (\S+)")[1]) as client:
            assert client.is_model_ready("ensemble")
        grpc_only.terminate()
        assert grpc_only.ended() == 0
    finally:
        grpc_only.kill()
    without_ports = Served("--port", "-1")
    assert without_ports.ended() == 2
    assert "port: is -1 (no HTTP) without grpc_port" in without_ports.lines[-1]


def test_base_url_may_include_endpoint_path(served: Served) -> None:
    """PaddleNLP's documentation configures clients in this way."""
    client = openai.OpenAI(base_url=f"{served.url}/chat/completions", api_key="none")
    usual_client = openai.OpenAI(base_url=served.url, api_key="none")
    completion = {"model": "default", "prompt": "Hello, how are you?", "max_tokens": 5, "temperature": 0}
    assert client.completions.create(**completion).choices == usual_client.completions.create(**completion).choices
    messages = [{"role": "user", "content": "Hello, who are you"}]
    chat = {"model": "default", "messages": messages, "max_tokens": 5, "temperature": 0}
    assert client.chat.completions.create(**chat).choices == usual_client.chat.completions.create(**chat).choices
