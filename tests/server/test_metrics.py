"""Metrics of a server without a profile, as read by vLLM's Grafana dashboard and llm-d's endpoint picker."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT
from serving import Served

DOCUMENT = ROOT / "docs/dialects/vllm.md"
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
"""Metrics of vLLM's dashboard by panel, without the two panels of gauges."""
VLLM = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info lora_requests_info "
    "num_requests_waiting_by_reason engine_sleep_state kv_offload_cpu_cache_usage_perc num_requests_swapped "
    "cpu_cache_usage_perc gpu_prefix_cache_hit_rate cpu_prefix_cache_hit_rate spec_decode_draft_acceptance_rate",
    "counter": "num_preemptions prompt_tokens prompt_tokens_cached prompt_tokens_by_source generation_tokens "
    "request_success prefix_cache_queries prefix_cache_hits external_prefix_cache_queries external_prefix_cache_hits "
    "mm_cache_queries mm_cache_hits spec_decode_num_drafts spec_decode_num_draft_tokens "
    "spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos",
    "histogram": "request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n "
    "request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds "
    "request_prefill_kv_computed_tokens iteration_tokens_total",
}
"""Metrics of vLLM's ``PrometheusStatLogger`` by type. All have the labels ``model_name`` and ``engine``, except
``lora_requests_info``."""
ENDPOINT_PICKER = {
    "num_requests_waiting": set(),
    "num_requests_running": set(),
    "kv_cache_usage_perc": set(),
    "lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "cache_config_info": {"block_size", "num_gpu_blocks"},
}
"""Metrics, with their required labels, that the endpoint picker of the Gateway API Inference Extension (used by llm-d)
reads by default."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--max-num-seqs", "2", "--num-gpu-blocks-override", "100") as served:
        httpx.post(f"{served.url}/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=60).raise_for_status()
        yield served


def families(served: Served) -> dict[str, Metric]:
    """Return the metric families by name, parsed by Prometheus' client."""
    return {family.name: family for family in text_string_to_metric_families(httpx.get(f"{served.root}/metrics").text)}


def series(served: Served) -> dict[str, float]:
    """Return the value of each series name, summed over labels."""
    totals: dict[str, float] = {}
    for line in httpx.get(f"{served.root}/metrics").text.splitlines():
        if not line.startswith("#"):
            name = re.split(r"[ {]", line, maxsplit=1)[0]
            totals[name] = totals.get(name, 0.0) + float(line.rpartition(" ")[2])
    return totals


@pytest.mark.parametrize("streamed", [False, True])
def test_every_panel_of_vllm_dashboard_has_data(served: Served, streamed: bool) -> None:
    before = series(served)
    request = {"prompt": "Once upon a time", "n": 2, "temperature": 1, "max_tokens": 300, "ignore_eos": True}
    httpx.post(f"{served.url}/completions", json=request | {"stream": streamed}, timeout=60).raise_for_status()
    after = series(served)
    for panel, names in PANELS.items():
        for name in names.split():
            assert after[f"vllm:{name}"] > before.get(f"vllm:{name}", 0), (panel, name)
    new = {name: after[name] - before.get(name, 0) for name in after}
    assert new["vllm:request_max_num_generation_tokens_sum"] == 300
    assert new["vllm:generation_tokens_total"] == new["vllm:request_generation_tokens_sum"] == 600
    assert new["vllm:request_params_n_sum"] == new["vllm:request_success_total"] == 2


def test_gauges_count_running_and_waiting_requests(served: Served) -> None:
    """llm-d selects a server by these gauges."""
    request = {"prompt": "Once upon a time", "n": 2, "max_tokens": 1500, "ignore_eos": True}

    async def gauges_under_load() -> dict[str, float]:
        async with httpx.AsyncClient(timeout=60) as client:
            tasks = [asyncio.create_task(client.post(f"{served.url}/completions", json=request)) for _ in range(6)]
            values: dict[str, float] = {}
            while values.get("vllm:num_requests_waiting", 0) < 1 or values["vllm:num_requests_running"] < 2:
                assert not all(task.done() for task in tasks), values
                values = await asyncio.to_thread(series, served)
            for task in tasks:
                task.cancel()
            return values

    values = asyncio.run(gauges_under_load())
    assert values["vllm:num_requests_running"] == 2 and 0 < values["vllm:kv_cache_usage_perc"] <= 1


@pytest.mark.row("vllm", "vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc", "vllm:gpu_prefix_cache_hit_rate")
@pytest.mark.row("vllm", "vllm:cpu_prefix_cache_hit_rate", "vllm:spec_decode_draft_acceptance_rate")
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
@pytest.mark.row("vllm", "vllm:kv_offload_cpu_cache_usage_perc", "vllm:lora_requests_info", "vllm:prompt_tokens_cached")
@pytest.mark.row("vllm", "vllm:request_prefill_kv_computed_tokens", "http_requests", "vllm:iteration_tokens_total")
@pytest.mark.row("vllm", "vllm:prompt_tokens_by_source", "vllm:num_requests_waiting_by_reason")
@pytest.mark.row("vllm", "vllm:engine_sleep_state")
def test_documented_metrics_exist_with_help_texts(served: Served) -> None:
    page = httpx.get(f"{served.root}/metrics").text
    for name in re.findall(r"`vllm:(\w+)`", DOCUMENT.read_text()):
        assert re.search(rf"^vllm:{name}(_total|_bucket|){{", page, re.MULTILINE), name
    help_texts = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    assert all(len(text.split()) >= 4 for text in help_texts.values()), json.dumps(help_texts, indent=1)


def test_vllm_metrics_have_types_and_labels_of_vllm(served: Served) -> None:
    deadline = time.monotonic() + 30
    while not series(served).get("vllm:iteration_tokens_total_sum"):  # the engine reports metrics periodically
        assert time.monotonic() < deadline
    metrics = families(served)
    for kind, names in VLLM.items():
        for name in names.split():
            family = metrics[f"vllm:{name}"]
            assert family.type == kind, name
            for sample in family.samples:
                assert name == "lora_requests_info" or sample.labels.items() >= {("engine", "0")}, sample
                assert sample.labels["model_name"] == served.name
    steps = {sample.name: sample.value for sample in metrics["vllm:iteration_tokens_total"].samples}
    assert steps["vllm:iteration_tokens_total_sum"] >= steps["vllm:iteration_tokens_total_count"] >= 1
    by_source = {sample.labels["source"]: sample.value for sample in metrics["vllm:prompt_tokens_by_source"].samples}
    assert sum(by_source.values()) == metrics["vllm:prompt_tokens"].samples[0].value
    states = {sample.labels["sleep_state"]: sample.value for sample in metrics["vllm:engine_sleep_state"].samples}
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    (reason,) = {sample.labels["finished_reason"] for sample in metrics["vllm:request_success"].samples}
    assert reason == "length"
    (ok,) = [
        sample
        for sample in metrics["http_requests"].samples
        if sample.labels == {"handler": "/v1/completions", "status": "2xx"}
    ]
    assert ok.name == "http_requests_total" and ok.value >= 1


def check_endpoint_picker_metrics(metrics: dict[str, Metric]) -> None:
    """Check that each metric has exactly one series. With several, the endpoint picker would read an arbitrary one."""
    for name, labels in ENDPOINT_PICKER.items():
        (sample,) = metrics[f"vllm:{name}"].samples
        assert sample.name == f"vllm:{name}" and labels <= set(sample.labels), name
        assert all(sample.labels[label].isdigit() for label in labels & {"block_size", "num_gpu_blocks", "max_lora"})


def test_endpoint_picker_metrics_have_single_series(served: Served) -> None:
    metrics = families(served)
    check_endpoint_picker_metrics(metrics)
    (adapters,) = metrics["vllm:lora_requests_info"].samples
    assert adapters.labels["max_lora"] == "0" and adapters.labels["running_lora_adapters"] == ""
    assert abs(adapters.value - time.time()) < 60


def test_metrics_aliases_option_limits_aliases() -> None:
    """With ``--metrics-aliases routers`` and two engines, the ``vllm:`` metrics are those that routers read."""
    flags = ("--num-gpu-blocks-override", "100", "--max-num-seqs", "2")
    with Served("--metrics-aliases", "routers", "--data-parallel-size", "2", "--server-dev-mode", *flags) as served:
        httpx.post(f"{served.url}/completions", json={"prompt": "Hi", "max_tokens": 2}, timeout=60).raise_for_status()
        metrics = families(served)
        check_endpoint_picker_metrics(metrics)
        assert {"vllm:time_to_first_token_seconds", "vllm:prefix_cache_hits", "vllm:request_success"} <= set(metrics)
        assert "vllm:e2e_request_latency_seconds" not in metrics and "http_requests" not in metrics
        ours = {name.removeprefix("penstock:") for name in metrics if name.startswith("penstock:")}
        assert {"e2e_request_latency_seconds", "replica_num_requests_running", "http_responses"} <= ours
        for level, state in (("1", "weights_offloaded"), ("2", "discard_all")):
            httpx.post(f"{served.root}/sleep?level={level}", timeout=60).raise_for_status()
            states = families(served)["vllm:engine_sleep_state"].samples
            assert [sample.labels["sleep_state"] for sample in states if sample.value] == [state]
            httpx.post(f"{served.root}/wake_up", timeout=60).raise_for_status()
    with Served("--metrics-aliases", "off", *flags) as served:
        assert not [name for name in families(served) if name.startswith("vllm:") or name == "http_requests"]


def test_access_log_line_has_time_client_dialect_and_model(served: Served) -> None:
    """A line in text format has date, path, request id, status, client address, dialect and model."""
    body = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    for path, dialect in (("/chat/completions", "openai"), ("/messages", "anthropic")):
        httpx.post(f"{served.url}{path}", json=body, timeout=60).raise_for_status()
        time_pattern = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} api: "
        request_pattern = rf"POST /v1{path} id=\w+ status=200 seconds=\S+ client=127\.0\.0\.1 dialect={dialect} model="
        served.find(time_pattern + request_pattern)
