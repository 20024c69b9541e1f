"""Our metrics under vLLM's names and labels, for dashboards, routers and autoscalers made for vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.config.options import EngineOptions
from penstock.engine.service.messages import Stats

ROUTER_NAMES = {
    name: name
    for name in (
        "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info num_preemptions "
        "prefix_cache_queries prefix_cache_hits prompt_tokens generation_tokens request_success "
        "time_to_first_token_seconds inter_token_latency_seconds"
    ).split()
} | {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
"""Our name by vLLM's name, without prefixes, of the metrics that routers and autoscalers read, also older ones."""
OTHER_NAMES = {
    name: name
    for name in (
        "request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n "
        "request_params_max_tokens request_time_per_output_token_seconds e2e_request_latency_seconds "
        "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds request_prefill_kv_computed_tokens iteration_tokens_total prompt_tokens_by_source "
        "num_requests_waiting_by_reason num_requests_swapped "
        "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
        "spec_decode_num_accepted_tokens_per_pos external_prefix_cache_queries external_prefix_cache_hits "
        "kv_offload_store_bytes kv_offload_load_bytes kv_offload_cpu_cache_usage_perc mm_cache_queries mm_cache_hits"
    ).split()
} | {"prompt_tokens_cached": "prefix_cache_hits", "cpu_cache_usage_perc": "kv_offload_cpu_cache_usage_perc"}
"""Our name by vLLM's name, without prefixes, of the metrics that only dashboards use."""
RATES = {
    "gpu_prefix_cache_hit_rate": ("prefix_cache_hits", "prefix_cache_queries", "prompt tokens found in the KV cache"),
    "cpu_prefix_cache_hit_rate": (
        "external_prefix_cache_hits",
        "external_prefix_cache_queries",
        "prompt tokens found in host memory",
    ),
    "spec_decode_draft_acceptance_rate": (
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_draft_tokens",
        "draft tokens that were accepted",
    ),
}
"""Our counters of the numerator and denominator, and the counted objects, by gauge of vLLM 0.6."""
NAMES: Mapping[str, Mapping[str, str]] = {"off": {}, "routers": ROUTER_NAMES, "all": ROUTER_NAMES | OTHER_NAMES}
"""Aliases by value of the option ``metrics_aliases``."""
ENGINE = "0"
"""Label ``engine`` of every series. All engines of a model are reported as one, since the server balances the load
between them; routers that find several series use only one of them."""


def vllm_metrics(
    families: Mapping[str, Metric], engines: Mapping[str, tuple[Stats, EngineOptions]], aliases: str
) -> Iterator[Metric]:
    """Return metrics under vLLM's names.

    Args:
        families: our metrics, by name without ``penstock:``.
        engines: statistics of all engines together, and options, by model.
        aliases: the option ``metrics_aliases``.
    """
    for name, source in NAMES[aliases].items():
        if metric := families.get(source):
            renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
            for sample in metric.samples:
                full = renamed.name + sample.name.removeprefix(metric.name)
                renamed.samples.append(sample._replace(name=full, labels={**sample.labels, "engine": ENGINE}))
            yield renamed
    if aliases != "off":
        yield _lora_requests(engines)
        yield _sleep_state(engines)
    if aliases == "all":
        yield from _rates(families, engines)
        if responses := families.get("http_responses"):
            yield _http_requests(responses)


def _rates(families: Mapping[str, Metric], models: Iterable[str]) -> Iterator[Metric]:
    """Ratios of counters since the start; 0 if nothing was counted."""
    for name, (part, whole, counted) in RATES.items():
        family = GaugeMetricFamily(f"vllm:{name}", f"Share of {counted}, 0 to 1.", labels=["model_name", "engine"])
        for model in models:
            family.add_metric([model, ENGINE], _count(families, part, model) / max(_count(families, whole, model), 1))
        yield family


def _count(families: Mapping[str, Metric], name: str, model: str) -> float:
    samples = families[name].samples if name in families else []
    counts = (one.value for one in samples if not one.name.endswith("_created") and one.labels["model_name"] == model)
    return float(sum(counts))


def _lora_requests(engines: Mapping[str, tuple[Stats, EngineOptions]]) -> Metric:
    """LoRA adapters of running and waiting requests. Present even without adapters: the endpoint picker of the Gateway
    API Inference Extension treats a server without this metric as unhealthy."""
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "LoRA adapters of running and waiting requests, as labels; the value is the time, in seconds since 1970.",
        labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    for model, (stats, options) in engines.items():
        most = options.max_loras if options.enable_lora or options.lora_modules else 0
        adapters = [",".join(names) for names in (stats.adapters_running, stats.adapters_waiting)]
        family.add_metric([model, str(most), *adapters], time.time())
    return family


def _sleep_state(engines: Mapping[str, tuple[Stats, EngineOptions]]) -> Metric:
    """Sleep state of the engines. Other metrics do not distinguish a sleeping engine from an idle engine."""
    family = GaugeMetricFamily(
        "vllm:engine_sleep_state",
        "1 for the current state of the engine: awake, weights_offloaded (KV cache freed) or discard_all (KV cache and "
        "weights freed); 0 for the other states.",
        labels=["model_name", "engine", "sleep_state"],
    )
    for model, (stats, _) in engines.items():
        asleep = stats.state.asleep
        state = ("discard_all" if "weights" in asleep else "weights_offloaded") if asleep else "awake"
        for name in ("awake", "weights_offloaded", "discard_all"):
            family.add_metric([model, ENGINE, name], name == state)
    return family


def _http_requests(responses: Metric) -> Metric:
    """HTTP requests by status class, as vLLM's server counts them (prometheus-fastapi-instrumentator)."""
    counts: dict[tuple[str, str], float] = {}
    for sample in responses.samples:
        if sample.name.endswith("_total"):
            key = sample.labels["path"], f"{sample.labels['status'][0]}xx"
            counts[key] = counts.get(key, 0.0) + sample.value
    family = CounterMetricFamily(
        "http_requests", "HTTP requests by route and status class.", labels=["handler", "status"]
    )
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family
