"""Prometheus metrics, one page over all API processes.

Each process counts in files of its own in the folder that ``PROMETHEUS_MULTIPROC_DIR`` names, where any of them can add
them up; what the engine knows is read from the engine.
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
    "prompt_tokens": "Prompt tokens of requests that have begun to answer.",
    "generation_tokens": "Tokens generated, over all requests.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache, found there or not.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache, which were not computed again.",
    "requests": "Requests received, whatever became of them.",
    "prefix_cache_hit_requests": "Requests some of whose prompt tokens were found in the prefix cache.",
}
"""Counters of each model: name → description."""
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token.", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Seconds between two consecutive tokens of a request.", PER_TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": (
        "A request's mean seconds per token after its first, one observation a request.",
        PER_TOKEN_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its last token.", REQUEST_BUCKETS),
    "request_queue_time_seconds": (
        "Seconds from a request's arrival until it was first scheduled.",
        REQUEST_BUCKETS,
    ),
    "request_inference_time_seconds": (
        "Seconds from when a request was first scheduled to its last token.",
        REQUEST_BUCKETS,
    ),
    "request_prefill_time_seconds": (
        "Seconds from when a request was first scheduled to its first token.",
        REQUEST_BUCKETS,
    ),
    "request_decode_time_seconds": ("Seconds from a request's first token to its last.", REQUEST_BUCKETS),
    "request_params_max_tokens": ("The max_tokens of requests that give one.", TOKEN_BUCKETS),
    "request_params_n": ("The n of requests: answers asked for.", SEQUENCE_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of each finished request.", TOKEN_BUCKETS),
    "request_generation_tokens": (
        "Tokens generated for each finished request, over all its sequences.",
        TOKEN_BUCKETS,
    ),
    "request_max_num_generation_tokens": ("Tokens of the longest sequence of each finished request.", TOKEN_BUCKETS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of each request that were not found in the prefix cache.",
        TOKEN_BUCKETS,
    ),
}
"""Histograms of each model: name → description, buckets."""


class Metrics:
    """The metrics of a server.

    Args:
        others: another system's names, as in its profile.
        aliases: which are repeated under vLLM's names: the option ``metrics_aliases``.
    """

    def __init__(self, others: Mapping[str, str | DerivedMetric] | None = None, aliases: str = "all") -> None:
        self._others = dict(others or {})
        self._aliases = aliases
        self.dialect_metrics: list[Callable[[EngineStats], Iterable[Metric]]] = []
        """Further metrics of dialects, computed from the engines' statistics."""

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"penstock:{name}", about, labels)

        self.by_model: dict[str, Counter | Histogram] = {
            name: counter(name, about, *LABELS) for name, about in COUNTERS.items()
        }
        """``COUNTERS`` and ``HISTOGRAMS``."""
        for name, (about, buckets) in HISTOGRAMS.items():
            self.by_model[name] = Histogram(f"penstock:{name}", about, LABELS, buckets=buckets)
        self.prompt_tokens_by_source = counter(
            "prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from: local_compute, or local_cache_hit (the prefix "
            "cache, its lower tiers and prefill instances included).",
            *LABELS,
            "source",
        )
        self.request_success = counter(
            "request_success",
            "Sequences that finished, by reason (stop: ended by itself; length).",
            *LABELS,
            "finished_reason",
        )
        self.request_failures = counter("request_failures", "Requests that ended with an error, by its code.", "code")
        self.event_loop_holds = counter(
            "event_loop_holds", "Times an API process's event loop was held for more than 50 ms; see its log."
        )
        self.http_responses = counter("http_responses", "HTTP responses, by route and status.", "path", "status")
        self.storage_refusals = counter(
            "storage_refusals", "What was not stored, by the limit that it would have exceeded.", "limit"
        )
        self.trace_spans = counter(
            "trace_spans",
            "Spans of traces of API processes: exported to the collector, or dropped as it did not take them.",
            "outcome",
        )
        self.open_requests = Gauge(
            "penstock:num_requests_open",
            "Requests now in an HTTP process: being read, waiting or answered.",
            LABELS,
            multiprocess_mode="livesum",
        )

    def of(self, model: str) -> ModelMetrics:
        """The metrics of one model."""
        return ModelMetrics(self, model)

    def record_failure(self, failure: Failure) -> None:
        self.request_failures.labels(code=failure.code.value).inc()

    def record_spans(self, outcome: str, count: int) -> None:
        """Count spans of traces: ``exported`` or ``dropped``."""
        self.trace_spans.labels(outcome=outcome).inc(count)

    def record_storage_refusal(self, limit: str) -> None:
        """Count what was not stored.

        Args:
            limit: its name in ``storage_quota``.
        """
        self.storage_refusals.labels(limit=limit).inc()

    def page(self, engines: EngineStats, more: Iterable[Metric] = ()) -> bytes:
        """The page of ``/metrics``.

        Args:
            more: metrics that are not told of an engine, nor counted here.
        """
        ours = [*counted(), *engine_metrics(engines), *expert_metrics(engines), *more]
        families = {family.name.removeprefix("penstock:"): family for family in ours}
        page = _Page([*ours, *vllm_metrics(families, engines, self._aliases), *self._derived(families, engines)])
        for collect in self.dialect_metrics:
            page.families.extend(collect(engines))
        encoded: bytes = generate_latest(page)
        return encoded

    def _derived(self, families: Mapping[str, Metric], engines: EngineStats) -> Iterator[Metric]:
        """Metrics under the names of the profile's system, and those derived from ours.

        Args:
            families: ours, by name without ``penstock:``.
        """
        figures: dict[str, Metric] = {}
        for name, source in self._others.items():
            if not isinstance(source, str):
                family, _, label = name.partition(".")
                figure = figures.setdefault(family, Metric(family, source.help, "gauge"))
                labels = {label: label} if label else {}
                for model, (_, options) in engines.items():
                    figure.add_sample(
                        family, {"model_name": model, **labels}, source.value(_current_values(families, model), options)
                    )
            elif metric := families.get(source):
                renamed = Metric(name, metric.documentation, metric.type)
                renamed.samples = [s._replace(name=name + s.name.removeprefix(metric.name)) for s in metric.samples]
                yield renamed
        yield from figures.values()


def counted() -> list[Metric]:
    """The metrics that API processes count, over all of them. Reads their files: some milliseconds."""
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
        """Count a request when it arrives."""
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

    def _observe(self, **figures: float) -> None:
        for name, figure in figures.items():
            self._metrics[name].observe(figure)


class TokenCounts:
    """Generated tokens and the latencies between them, written to the process's file several at a time.

    Every token of every stream is counted, and three writes for each took 4 % of an API process's time at 64 streams.
    A context manager, to be entered while a request generates: at its end all that was counted is written.
    """

    FLUSH_INTERVAL = 0.1
    """Seconds between two writes while tokens are counted."""

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
            seconds: since its previous tokens; None for the first.
            sequences: number of its sequences.
        """
        self._tokens += tokens
        if seconds is not None:
            self._latencies.append(seconds / max(tokens / sequences, 1))
        if time.monotonic() - self._flushed > self.FLUSH_INTERVAL:
            self._flush()

    def _flush(self) -> None:
        self._counter.inc(self._tokens)
        counts = collections.Counter(bisect_left(PER_TOKEN_BUCKETS, latency) for latency in self._latencies)
        for bucket, count in counts.items():  # Histogram.observe takes one observation at a time
            self._histogram._buckets[bucket].inc(count)
        self._histogram._sum.inc(sum(self._latencies))
        self._tokens, self._latencies, self._flushed = 0, [], time.monotonic()


class _Page:
    """The metrics of a page, as prometheus-client takes them."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def _current_values(families: Mapping[str, Metric], model: str) -> dict[str, float]:
    """The values of a model's counters and gauges."""
    return {
        name: sum(sample.value for sample in result.samples if sample.labels.get("model_name", model) == model)
        for name, result in families.items()
        if result.type in SINGLE_VALUE_TYPES
    }
