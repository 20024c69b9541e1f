"""The metrics of a server without any profile, as vLLM's dashboard for Grafana and llm-d's scheduler read them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Served

DOCUMENT = Path(__file__).parents[1] / "docs/dialects/vllm.md"
PANELS = {
    "E2E Request Latency": "e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum",
    "Token Throughput": "prompt_tokens_total generation_tokens_total",
    "Inter Token Latency": "inter_token_latency_seconds_bucket inter_token_latency_seconds_count",
    "Time To First Token Latency": "time_to_first_token_seconds_bucket time_to_first_token_seconds_sum",
    "Request Prompt Length": "request_prompt_tokens_bucket",
    "Request Generation Length": "request_generation_tokens_bucket",
    "Finish Reason": "request_success_total",
    "Queue Time": "request_queue_time_seconds_sum",
    "Requests Prefill and Decode Time": "request_prefill_time_seconds_sum request_decode_time_seconds_sum",
    "Max Generation Token in Sequence Group": "request_max_num_generation_tokens_sum",
}
"""What the panels of vLLM's dashboard show, but for its two panels of gauges."""
LLM_D = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--max-num-seqs", "2", "--num-gpu-blocks-override", "100") as served:
        httpx.post(f"{served.url}/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=60).raise_for_status()
        yield served


def series(served: Served) -> dict[str, float]:
    """By name, added up over labels."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{served.root}/metrics").text.splitlines():
        if not line.startswith("#"):
            name = re.split(r"[ {]", line, maxsplit=1)[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


@pytest.mark.parametrize("streamed", [False, True])
def test_every_panel_of_vllm_s_dashboard_moves(served: Served, streamed: bool) -> None:
    before = series(served)
    asked = {"prompt": "Once upon a time", "n": 2, "temperature": 1, "max_tokens": 300, "ignore_eos": True}
    httpx.post(f"{served.url}/completions", json=asked | {"stream": streamed}, timeout=60).raise_for_status()
    after = series(served)
    for panel, names in PANELS.items():
        for name in names.split():
            assert after[f"vllm:{name}"] > before.get(f"vllm:{name}", 0), (panel, name)
    new = {name: after[name] - before.get(name, 0) for name in after}
    assert new["vllm:request_max_num_generation_tokens_sum"] == 300
    assert new["vllm:generation_tokens_total"] == new["vllm:request_generation_tokens_sum"] == 600
    assert new["vllm:request_params_n_sum"] == new["vllm:request_success_total"] == 2


def test_gauges_tell_who_runs_and_who_waits(served: Served) -> None:
    """By these llm-d chooses a server."""
    asked = {"prompt": "Once upon a time", "n": 2, "max_tokens": 1500, "ignore_eos": True}

    async def crowded() -> dict[str, float]:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.create_task(client.post(f"{served.url}/completions", json=asked)) for _ in range(6)]
            found: dict[str, float] = {}
            while found.get("vllm:num_requests_waiting", 0) < 1 or found["vllm:num_requests_running"] < 2:
                assert not all(task.done() for task in tasks), found
                found = await asyncio.to_thread(series, served)
            for task in tasks:
                task.cancel()
            return found

    found = asyncio.run(crowded())
    assert found["vllm:num_requests_running"] == 2 and 0 < found["vllm:kv_cache_usage_perc"] <= 1
    assert set(LLM_D) <= set(found)


@pytest.mark.row("vllm", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions")
@pytest.mark.row("vllm", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:prompt_tokens")
@pytest.mark.row("vllm", "vllm:generation_tokens", "vllm:request_prompt_tokens", "vllm:request_generation_tokens")
@pytest.mark.row("vllm", "vllm:request_success", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")
@pytest.mark.row("vllm", "vllm:time_per_output_token_seconds", "vllm:e2e_request_latency_seconds")
@pytest.mark.row("vllm", "vllm:request_max_num_generation_tokens", "vllm:request_params_n")
@pytest.mark.row("vllm", "vllm:request_params_max_tokens", "vllm:request_queue_time_seconds")
@pytest.mark.row("vllm", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds")
@pytest.mark.row("vllm", "vllm:request_inference_time_seconds", "vllm:request_time_per_output_token_seconds")
@pytest.mark.row("vllm", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:cache_config_info")
@pytest.mark.row("vllm", "vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits")
@pytest.mark.row("vllm", "vllm:kv_offload_store_bytes", "vllm:kv_offload_load_bytes")
@pytest.mark.row("vllm", "vllm:kv_offload_cpu_cache_usage_perc")
def test_the_document_s_names_are_there_and_say_what_they_count(served: Served) -> None:
    page = httpx.get(f"{served.root}/metrics").text
    for name in re.findall(r"`vllm:(\w+)`", DOCUMENT.read_text()):
        assert re.search(rf"^vllm:{name}(_total|_bucket|){{", page, re.MULTILINE), name
    about = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    assert all(len(words.split()) >= 4 for words in about.values()), json.dumps(about, indent=1)


def test_a_line_of_the_log_says_when_who_what_and_how(served: Served) -> None:
    """Date, client, dialect and model, as text for people."""
    body = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    for path, dialect in (("/chat/completions", "openai"), ("/messages", "anthropic")):
        httpx.post(f"{served.url}{path}", json=body, timeout=60).raise_for_status()
        when = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} api: "
        who = rf"POST /v1{path} id=\w+ status=200 seconds=\S+ client=127\.0\.0\.1 dialect={dialect} model="
        served.find(when + who)
