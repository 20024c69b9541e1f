"""Prometheus metrics of all API processes and engines.

Each API process counts in separate files in the folder ``PROMETHEUS_MULTIPROC_DIR``; any process can aggregate them.
Engine metrics are read from the engines.
"""

from __future__ import annotations

import collections
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.config.profiles import DerivedMetric
from penstock.core import Failure, SamplingParams
from penstock.frontend.outputs import RequestOutput

from .engine_metrics import LABELS, EngineStats, engine_metrics
from .expert_load import expert_metrics
from .vllm_metrics import vllm_metrics

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SEQUENCE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
SINGLE_VALUE_TYPES = ("counter", "gauge")
"""Types of metrics with a single value."""


COUNTERS = {
    "prompt_tokens": "Prompt tokens, counted at a request's first output token.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "requests": "Requests received, including failed ones.",
    "prefix_cache_hit_requests": "Requests with at least one prompt token found in the prefix cache.",
}
"""Counters per model: name → description."""
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token.", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Seconds between consecutive tokens of a request.", PER_TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Mean seconds per output token after the first, one observation per request.",
        PER_TOKEN_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its last token.", REQUEST_BUCKETS),
    "request_queue_time_seconds": (
        "Seconds from a request's arrival until it is first scheduled.",
        REQUEST_BUCKETS,
    ),
    "request_inference_time_seconds": (
        "Seconds from a request's first scheduling to its last token.",
        REQUEST_BUCKETS,
    ),
    "request_prefill_time_seconds": (
        "Seconds from a request's first scheduling to its first token.",
        REQUEST_BUCKETS,
    ),
    "request_decode_time_seconds": ("Seconds from a request's first token to its last.", REQUEST_BUCKETS),
    "request_params_max_tokens": ("Parameter max_tokens of requests that set it.", TOKEN_BUCKETS),
    "request_params_n": ("Parameter n of requests: number of answers.", SEQUENCE_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens per finished request.", TOKEN_BUCKETS),
    "request_generation_tokens": (
        "Tokens generated per finished request, all sequences together.",
        TOKEN_BUCKETS,
    ),
    "request_max_num_generation_tokens": ("Tokens of the longest sequence per finished request.", TOKEN_BUCKETS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens per request that were not found in the prefix cache.",
        TOKEN_BUCKETS,
    ),
}
"""Histograms per model: name → description, buckets."""


class Metrics:
    """The metrics of a server.

    Args:
        profile_metrics: metrics of the profile's system: its name → our name, or a derived metric.
        aliases: option ``metrics_aliases``: which metrics are repeated under vLLM's names.
    """

    def __init__(self, profile_metrics: Mapping[str, str | DerivedMetric] | None = None, aliases: str = "all") -> None:
        self._profile_metrics = dict(profile_metrics or {})
        self._aliases = aliases
        self.dialect_metrics: list[Callable[[EngineStats], Iterable[Metric]]] = []
        """Functions that compute further metrics of dialects from the engines' statistics."""

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"penstock:{name}", about, labels)

        self.by_model: dict[str, Counter | Histogram] = {
            name: counter(name, about, *LABELS) for name, about in COUNTERS.items()
        }
        """The metrics of ``COUNTERS`` and ``HISTOGRAMS``, by name."""
        for name, (about, buckets) in HISTOGRAMS.items():
            self.by_model[name] = Histogram(f"penstock:{name}", about, LABELS, buckets=buckets)
        self.prompt_tokens_by_source = counter(
            "prompt_tokens_by_source",
            "Prompt tokens by source of their KV: local_compute, or local_cache_hit (prefix cache, including its lower "
            "tiers and prefill instances).",
            *LABELS,
            "source",
        )
        self.request_success = counter(
            "request_success",
            "Finished sequences by finish reason (stop, length).",
            *LABELS,
            "finished_reason",
        )
        self.request_failures = counter("request_failures", "Failed requests by error code.", "code")
        self.event_loop_holds = counter(
            "event_loop_holds", "Times an API process's event loop was blocked for more than 50 ms (see its log)."
        )
        self.http_responses = counter("http_responses", "HTTP responses by route and status.", "path", "status")
        self.storage_refusals = counter(
            "storage_refusals", "Requests to store something that were rejected, by the exceeded limit.", "limit"
        )
        self.trace_spans = counter(
            "trace_spans",
            "Trace spans of API processes: exported to the collector, or dropped because it did not accept them.",
            "outcome",
        )
        self.open_requests = Gauge(
            "penstock:num_requests_open",
            "Requests that an API process is reading, queueing or answering.",
            LABELS,
            multiprocess_mode="livesum",
        )

    def of(self, model: str) -> ModelMetrics:
        """The request metrics of one model."""
        return ModelMetrics(self, model)

    def record_failure(self, failure: Failure) -> None:
        self.request_failures.labels(code=failure.code.value).inc()

    def record_spans(self, outcome: str, count: int) -> None:
        """Count trace spans. ``outcome`` is ``exported`` or ``dropped``."""
        self.trace_spans.labels(outcome=outcome).inc(count)

    def record_storage_refusal(self, limit: str) -> None:
        """Count a rejected request to store something. ``limit`` is a name of ``storage_quota``."""
        self.storage_refusals.labels(limit=limit).inc()

    def page(self, engines: EngineStats, more: Iterable[Metric] = ()) -> bytes:
        """Return the page ``/metrics``; ``more`` are further metrics."""
        ours = [*process_metrics(), *engine_metrics(engines), *expert_metrics(engines), *more]
        families = {family.name.removeprefix("penstock:"): family for family in ours}
        page = _Page([*ours, *vllm_metrics(families, engines, self._aliases), *self._derived(families, engines)])
        for collect in self.dialect_metrics:
            page.families.extend(collect(engines))
        encoded: bytes = generate_latest(page)
        return encoded

    def _derived(self, families: Mapping[str, Metric], engines: EngineStats) -> Iterator[Metric]:
        """Metrics under the names of the profile's system.

        Args:
            families: our metrics, by name without ``penstock:``.
        """
        derived: dict[str, Metric] = {}
        for name, source in self._profile_metrics.items():
            if not isinstance(source, str):
                family, _, label = name.partition(".")
                gauge = derived.setdefault(family, Metric(family, source.help, "gauge"))
                labels = {label: label} if label else {}
                for model, (_, options) in engines.items():
                    gauge.add_sample(
                        family, {"model_name": model, **labels}, source.value(_current_values(families, model), options)
                    )
            elif metric := families.get(source):
                renamed = Metric(name, metric.documentation, metric.type)
                renamed.samples = [s._replace(name=name + s.name.removeprefix(metric.name)) for s in metric.samples]
                yield renamed
        yield from derived.values()


def process_metrics() -> list[Metric]:
    """Aggregate the metrics of all API processes. Reads their files, which takes some milliseconds."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return [*registry.collect()]


class ModelMetrics:
    """The request metrics of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics: dict[str, Any] = {name: metric.labels(model) for name, metric in metrics.by_model.items()}
        latency = self._metrics["inter_token_latency_seconds"]
        self.tokens = TokenCounts(self._metrics["generation_tokens"], latency)
        self._computed = metrics.prompt_tokens_by_source.labels(model, "local_compute")
        self._cached = metrics.prompt_tokens_by_source.labels(model, "local_cache_hit")
        self._request_success = partial(metrics.request_success.labels, model)
        self.open_requests = metrics.open_requests.labels(model)

    def record_arrival(self, sampling: SamplingParams) -> None:
        """Record a request's arrival."""
        self._count(requests=1)
        self._observe(request_params_n=sampling.n)
        if sampling.max_tokens is not None:
            self._observe(request_params_max_tokens=sampling.max_tokens)

    def record_first_token(self, output: RequestOutput) -> None:
        """Record a request's first token."""
        times, prompt, cached = output.times, len(output.prompt_token_ids), output.num_cached_tokens
        assert times.first_token is not None
        self._count(
            prompt_tokens=prompt,
            prefix_cache_queries=prompt,
            prefix_cache_hits=cached,
            prefix_cache_hit_requests=bool(cached),
        )
        self._cached.inc(cached)
        self._computed.inc(prompt - cached)
        self._observe(
            time_to_first_token_seconds=times.first_token - times.arrived, request_queue_time_seconds=times.queued
        )

    def record_finish(self, output: RequestOutput) -> None:
        """Record a finished request."""
        times, lengths = output.times, [len(completion.token_ids) for completion in output.outputs]
        for completion in output.outputs:
            self._request_success(completion.finish_reason).inc()
        longest, prompt = max(lengths, default=0), len(output.prompt_token_ids)
        self._observe(
            request_prompt_tokens=prompt,
            request_prefill_kv_computed_tokens=prompt - output.num_cached_tokens,
            request_generation_tokens=sum(lengths),
            request_max_num_generation_tokens=longest,
        )
        if times.first_token is None or times.last_token is None:
            return
        began = times.arrived + times.queued
        self._observe(
            e2e_request_latency_seconds=times.last_token - times.arrived,
            request_inference_time_seconds=times.last_token - began,
            request_prefill_time_seconds=times.first_token - began,
            request_decode_time_seconds=times.last_token - times.first_token,
        )
        if longest > 1:
            per_token = (times.last_token - times.first_token) / (longest - 1)
            self._observe(request_time_per_output_token_seconds=per_token)

    def _count(self, **counts: float) -> None:
        for name, count in counts.items():
            self._metrics[name].inc(count)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._metrics[name].observe(value)


class TokenCounts:
    """Counts of generated tokens and inter-token latencies, written to the process's file in batches.

    Three writes per token took 4 % of an API process's time at 64 streams. A context manager to enter while a request
    generates; on exit all counts are written.
    """

    FLUSH_INTERVAL = 0.1
    """Minimum time between two writes in seconds."""

    def __init__(self, tokens: Counter, latency: Histogram) -> None:
        self._counter, self._histogram = tokens, latency
        self._tokens, self._latencies, self._flushed = 0, list[float](), 0.0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._flush()

    def add(self, tokens: int, seconds: float | None, sequences: int) -> None:
        """Count new tokens of a request.

        Args:
            seconds: time since its previous tokens; None for the first.
            sequences: number of sequences of the request.
        """
        self._tokens += tokens
        if seconds is not None:
            self._latencies.append(seconds / max(tokens / sequences, 1))
        if time.monotonic() - self._flushed > self.FLUSH_INTERVAL:
            self._flush()

    def _flush(self) -> None:
        self._counter.inc(self._tokens)
        counts = collections.Counter(bisect_left(PER_TOKEN_BUCKETS, latency) for latency in self._latencies)
        for bucket, count in counts.items():  # Histogram.observe takes a single observation
            self._histogram._buckets[bucket].inc(count)
        self._histogram._sum.inc(sum(self._latencies))
        self._tokens, self._latencies, self._flushed = 0, [], time.monotonic()


class _Page:
    """Adapter of a list of metrics to a prometheus-client registry."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def _current_values(families: Mapping[str, Metric], model: str) -> dict[str, float]:
    """Values of a model's counters and gauges by name."""
    return {
        name: sum(sample.value for sample in result.samples if sample.labels.get("model_name", model) == model)
        for name, result in families.items()
        if result.type in SINGLE_VALUE_TYPES
    }
