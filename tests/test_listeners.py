"""Ports besides the one for requests, and dialects that share paths."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from serving import Served


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
            assert refused.status_code == 404 and "health and metrics only" in refused.json()["error"]["message"]


def test_a_base_url_that_is_a_path_finds_its_way(served: Served) -> None:
    """As PaddleNLP's document has it."""
    odd = openai.OpenAI(base_url=f"{served.url}/chat/completions", api_key="none")
    usual = openai.OpenAI(base_url=served.url, api_key="none")
    asked = {"model": "default", "prompt": "Hello, how are you?", "max_tokens": 5, "temperature": 0}
    assert odd.completions.create(**asked).choices == usual.completions.create(**asked).choices
    messages = [{"role": "user", "content": "Hello, who are you"}]
    chat = {"model": "default", "messages": messages, "max_tokens": 5, "temperature": 0}
    assert odd.chat.completions.create(**chat).choices == usual.chat.completions.create(**chat).choices
