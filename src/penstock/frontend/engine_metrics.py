"""``LLM.get_metrics``: metrics of an engine in this process, under vLLM's names."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.engine.engine import Engine

from .outputs import RequestOutput

FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bounds of ``vllm:time_to_first_token_seconds``."""
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
"""Bounds of ``vllm:e2e_request_latency_seconds``."""


@dataclass
class Metric:
    """A metric with its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Vector(Metric):
    """Counts by position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Numbers of observations up to each bound; the bound ``+Inf`` has all."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(slots=True)
class RequestCounts:
    """Counts of the finished requests of an ``LLM``."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    finished: Counts[str] = field(default_factory=Counts)
    """Sequences by reason of their end."""
    first_token: list[float] = field(default_factory=list)
    """Seconds from arrival to the first token, per request."""
    latency: list[float] = field(default_factory=list)
    """Seconds from arrival to the last token, per request."""

    def add(self, output: RequestOutput) -> None:
        """Count a finished request."""
        times = output.times
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        self.generation_tokens += sum(len(one.token_ids) for one in output.outputs)
        self.finished.update(one.finish_reason or "" for one in output.outputs)
        if times.first_token is not None and times.last_token is not None:
            self.first_token.append(times.first_token - times.arrived)
            self.latency.append(times.last_token - times.arrived)


def snapshot(engine: Engine, counts: RequestCounts, model: str) -> list[Metric]:
    """Metrics of an engine and its finished requests."""
    labels = {"model_name": model, "engine": "0"}
    scheduler = engine.scheduler
    pool = scheduler.device_pool
    gauges = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": scheduler.admission.num_waiting,
        "kv_cache_usage_perc": pool.num_used / max(pool.total, 1),
    }
    counters = {
        "num_preemptions": scheduler.num_preemptions,
        "prompt_tokens": counts.prompt_tokens,
        "generation_tokens": counts.generation_tokens,
        "prefix_cache_queries": counts.prompt_tokens,
        "prefix_cache_hits": counts.cached_tokens,
    }
    metrics: list[Metric] = [Gauge(f"vllm:{name}", labels, value) for name, value in gauges.items()]
    metrics += [Counter(f"vllm:{name}", labels, value) for name, value in counters.items()]
    for reason, count in sorted(counts.finished.items()):
        metrics.append(Counter("vllm:request_success", {**labels, "finished_reason": reason}, count))
    metrics.append(_histogram("time_to_first_token_seconds", labels, counts.first_token, FIRST_TOKEN_BUCKETS))
    metrics.append(_histogram("e2e_request_latency_seconds", labels, counts.latency, REQUEST_BUCKETS))
    if speculation := scheduler.speculation:
        stats = speculation.stats
        metrics.append(Counter("vllm:spec_decode_num_drafts", labels, stats.drafts))
        metrics.append(Counter("vllm:spec_decode_num_draft_tokens", labels, stats.draft_tokens))
        metrics.append(Counter("vllm:spec_decode_num_accepted_tokens", labels, stats.accepted_tokens))
        metrics.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, list(stats.accepted_at)))
    return metrics


def _histogram(name: str, labels: dict[str, str], values: Sequence[float], bounds: Iterable[float]) -> Histogram:
    buckets = {str(bound): sum(value <= bound for value in values) for bound in bounds} | {"+Inf": len(values)}
    return Histogram(f"vllm:{name}", labels, len(values), sum(values), buckets)
