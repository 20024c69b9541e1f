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
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.config.options import EngineOptions
from penstock.config.profiles import DerivedMetric
from penstock.core import Failure, SamplingParams
from penstock.engine.service.messages import Stats
from penstock.engine.step_statistics import BUCKETS
from penstock.frontend.outputs import RequestOutput

from .encoder_metrics import encoder_metrics
from .expert_load import expert_metrics
from .vllm_metrics import vllm_metrics

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SEQUENCE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
CACHE_OPTIONS = ("block_size", "kv_cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")
"""Options in ``cache_config_info``."""
KV_TRANSFER_COUNTERS = {
    "transfers": "KV transfers begun by decode engines.",
    "completed": "KV transfers that brought a prompt's keys and values.",
    "failed": "KV transfers that failed.",
    "recomputed": "Requests whose prompts a decode engine computed since their KV transfers failed.",
    "seconds": "Time of completed KV transfers, the prefill engine's queue and computation included.",
    "bytes_received": "Bytes of keys and values that came from prefill engines.",
    "bytes_sent": "Bytes of keys and values sent to decode engines over TCP.",
    "rereads": "Parts of KV transfers that were read again.",
    "checksum_failures": "Parts of KV transfers whose checksum was wrong.",
}
"""Counters of engines: field of ``Stats`` after ``kv_`` → description."""
OFFLOAD_COUNTERS = {
    "external_prefix_cache_queries": (
        "queries",
        "Prompt tokens that the KV cache did not have, looked up in host memory (kv_offloading_size).",
    ),
    "external_prefix_cache_hits": ("hits", "Those of them that were found there; also counted as prefix_cache_hits."),
    "kv_offload_store_bytes": ("bytes_stored", "Bytes of cached prefixes copied from the KV cache to host memory."),
    "kv_offload_load_bytes": ("bytes_loaded", "Bytes of cached prefixes copied from host memory to the KV cache."),
    "kv_offload_evictions": ("evictions", "KV blocks of cached prefixes that were evicted from host memory."),
    "kv_offload_disk_hits": ("disk_hits", "Prompt tokens read from the disk (kv_offloading_disk_path)."),
    "kv_offload_disk_read_bytes": ("disk_bytes_read", "Bytes of cached prefixes read from the disk."),
    "kv_offload_disk_write_bytes": ("disk_bytes_written", "Bytes of cached prefixes written to the disk."),
    "kv_offload_disk_evictions": ("disk_evictions", "Files of cached prefixes deleted to make room on the disk."),
    "kv_offload_disk_read_failures": ("disk_read_failures", "Files that were damaged, and reads that took too long."),
    "kv_offload_disk_write_failures": ("disk_write_failures", "KV blocks that could not be written to the disk."),
}
"""Counters of engines: field of ``Stats`` after ``offload_``, and description."""
SINGLE_VALUE_TYPES = ("counter", "gauge")
"""Types of metrics with a single value."""
LABELS = ["model_name"]
EngineStats = Mapping[str, tuple[Stats, EngineOptions]]
"""By model: the last statistics of its engine, and its options."""


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

        def counter(name: str, about: str, *more: str) -> Counter:
            return Counter(f"penstock:{name}", about, [*LABELS, *more])

        def histogram(name: str, about: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"penstock:{name}", about, LABELS, buckets=list(buckets))

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that have begun to answer.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated, over all requests.")
        self.cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache, found there or not."
        )
        self.cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache, which were not computed again."
        )
        self.prompt_tokens_by_source = counter(
            "prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from: local_compute, or local_cache_hit (the prefix "
            "cache, its lower tiers and prefill instances included).",
            "source",
        )
        self.requests = counter("requests", "Requests received, whatever became of them.")
        self.cache_hit_requests = counter(
            "prefix_cache_hit_requests", "Requests some of whose prompt tokens were found in the prefix cache."
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Seconds between two consecutive tokens of a request.", PER_TOKEN_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean seconds per token after its first, one observation a request.",
            PER_TOKEN_BUCKETS,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its last token.", REQUEST_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds",
            "Seconds from a request's arrival until it was first scheduled.",
            REQUEST_BUCKETS,
        )
        self.inference_time = histogram(
            "request_inference_time_seconds",
            "Seconds from when a request was first scheduled to its last token.",
            REQUEST_BUCKETS,
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds",
            "Seconds from when a request was first scheduled to its first token.",
            REQUEST_BUCKETS,
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "Seconds from a request's first token to its last.", REQUEST_BUCKETS
        )
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The max_tokens of requests that give one.", TOKEN_BUCKETS
        )
        self.params_n = histogram("request_params_n", "The n of requests: answers asked for.", SEQUENCE_BUCKETS)
        self.prompt_lengths = histogram(
            "request_prompt_tokens", "Prompt tokens of each finished request.", TOKEN_BUCKETS
        )
        self.generation_lengths = histogram(
            "request_generation_tokens",
            "Tokens generated for each finished request, over all its sequences.",
            TOKEN_BUCKETS,
        )
        self.max_generation_lengths = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest sequence of each finished request.",
            TOKEN_BUCKETS,
        )
        self.prefill_computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of each request that were not found in the prefix cache.",
            TOKEN_BUCKETS,
        )
        self.request_success = counter(
            "request_success", "Sequences that finished, by reason (stop: ended by itself; length).", "finished_reason"
        )
        self.request_failures = Counter(
            "penstock:request_failures", "Requests that ended with an error, by its code.", ["code"]
        )
        self.event_loop_holds = Counter(
            "penstock:event_loop_holds", "Times an API process's event loop was held for more than 50 ms; see its log."
        )
        self.http_responses = Counter(
            "penstock:http_responses", "HTTP responses, by route and status.", ["path", "status"]
        )
        self.storage_refusals = Counter(
            "penstock:storage_refusals", "What was not stored, by the limit that it would have exceeded.", ["limit"]
        )
        self.trace_spans = Counter(
            "penstock:trace_spans",
            "Spans of traces of API processes: exported to the collector, or dropped as it did not take them.",
            ["outcome"],
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
        ours = [*counted(), *_EngineMetrics(engines).collect(), *more]
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
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self.tokens = TokenCounts(metrics.generation_tokens.labels(model), metrics.inter_token_latency.labels(model))
        self._cache_queries = metrics.cache_queries.labels(model)
        self._cache_hits = metrics.cache_hits.labels(model)
        self._computed = metrics.prompt_tokens_by_source.labels(model, "local_compute")
        self._cached = metrics.prompt_tokens_by_source.labels(model, "local_cache_hit")
        self._requests = metrics.requests.labels(model)
        self._cache_hit_requests = metrics.cache_hit_requests.labels(model)
        self._time_to_first_token = metrics.time_to_first_token.labels(model)
        self._time_per_output_token = metrics.time_per_output_token.labels(model)
        self._e2e_latency = metrics.e2e_latency.labels(model)
        self._queue_time = metrics.queue_time.labels(model)
        self._inference_time = metrics.inference_time.labels(model)
        self._prefill_time = metrics.prefill_time.labels(model)
        self._decode_time = metrics.decode_time.labels(model)
        self._params_max_tokens = metrics.params_max_tokens.labels(model)
        self._params_n = metrics.params_n.labels(model)
        self._max_generation_lengths = metrics.max_generation_lengths.labels(model)
        self._prompt_lengths = metrics.prompt_lengths.labels(model)
        self._generation_lengths = metrics.generation_lengths.labels(model)
        self._prefill_computed = metrics.prefill_computed.labels(model)
        self._request_success = partial(metrics.request_success.labels, model)
        self.open_requests = metrics.open_requests.labels(model)

    def record_arrival(self, sampling: SamplingParams) -> None:
        """Count a request when it arrives."""
        self._requests.inc()
        self._params_n.observe(sampling.n)
        if sampling.max_tokens is not None:
            self._params_max_tokens.observe(sampling.max_tokens)

    def record_first_token(self, output: RequestOutput) -> None:
        """Record a request's first token."""
        times, prompt = output.times, len(output.prompt_token_ids)
        assert times.first_token is not None
        self._prompt_tokens.inc(prompt)
        self._cache_queries.inc(prompt)
        self._cache_hits.inc(output.num_cached_tokens)
        self._cached.inc(output.num_cached_tokens)
        self._computed.inc(prompt - output.num_cached_tokens)
        self._cache_hit_requests.inc(bool(output.num_cached_tokens))
        self._time_to_first_token.observe(times.first_token - times.arrived)
        self._queue_time.observe(times.queued)

    def record_finish(self, output: RequestOutput) -> None:
        """Record a finished request."""
        times, tokens = output.times, sum(len(completion.token_ids) for completion in output.outputs)
        for completion in output.outputs:
            self._request_success(completion.finish_reason).inc()
        self._prompt_lengths.observe(len(output.prompt_token_ids))
        self._prefill_computed.observe(len(output.prompt_token_ids) - output.num_cached_tokens)
        self._generation_lengths.observe(tokens)
        self._max_generation_lengths.observe(
            max((len(completion.token_ids) for completion in output.outputs), default=0)
        )
        if times.first_token is not None and times.last_token is not None:
            self._e2e_latency.observe(times.last_token - times.arrived)
            began = times.arrived + times.queued
            self._inference_time.observe(times.last_token - began)
            self._prefill_time.observe(times.first_token - began)
            self._decode_time.observe(times.last_token - times.first_token)
            each = max(len(completion.token_ids) for completion in output.outputs)
            if each > 1:
                self._time_per_output_token.observe((times.last_token - times.first_token) / (each - 1))


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


class _EngineMetrics:
    """The engines' statistics as metrics."""

    def __init__(self, engines: EngineStats) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        gauges: dict[str, tuple[str, Callable[[Stats], float]]] = {
            "num_requests_running": ("Sequences that the engine is computing now.", lambda stats: stats.running),
            "num_requests_waiting": ("Sequences that wait to be scheduled.", lambda stats: stats.waiting),
            "num_requests_swapped": (
                "Preempted sequences whose KV blocks are in host memory.",
                lambda stats: stats.num_swapped,
            ),
            "kv_cache_usage_perc": (
                "Share of the KV cache's blocks in use, 0 to 1.",
                lambda stats: stats.blocks_used / max(stats.blocks, 1),
            ),
            "kv_blocks": ("Blocks of the KV cache.", lambda stats: stats.blocks),
            "kv_blocks_used": ("Blocks of the KV cache that sequences hold.", lambda stats: stats.blocks_used),
            "kv_blocks_free": (
                "Blocks of the KV cache that no sequence holds, cached prefixes among them.",
                lambda stats: stats.blocks - stats.blocks_used,
            ),
            "kv_transfer_slots": (
                "Slots of the transfer buffers of separate prefill and decode instances.",
                lambda stats: stats.kv_slots,
            ),
            "kv_transfer_slots_used": ("Those that KV transfers hold.", lambda stats: stats.kv_slots_used),
            "kv_offload_cpu_cache_usage_perc": (
                "Share of the host memory for cached prefixes that holds some, 0 to 1.",
                lambda stats: stats.offload_slots_used / max(stats.offload_slots, 1),
            ),
            "engine_heartbeat_age_seconds": (
                "Seconds since the engine's loop last came round.",
                lambda stats: stats.heartbeat_age,
            ),
            "engine_paused": ("Whether the engine computes no steps now, 0 or 1.", lambda stats: stats.state.is_paused),
            "engine_asleep": (
                "Whether the engine has freed its KV cache or weights, 0 or 1.",
                lambda stats: bool(stats.state.asleep),
            ),
            "engine_longest_step_seconds": (
                "Longest step since the engine started, in seconds.",
                lambda stats: stats.longest_step,
            ),
        }
        drafts: dict[str, tuple[str, Callable[[Stats], float]]] = {
            "spec_decode_num_drafts": (
                "Drafts: times that tokens were proposed for a sequence by speculative decoding.",
                lambda stats: stats.drafts,
            ),
            "spec_decode_num_draft_tokens": (
                "Draft tokens proposed by speculative decoding.",
                lambda stats: stats.draft_tokens,
            ),
            "spec_decode_num_accepted_tokens": (
                "Draft tokens that the model accepted.",
                lambda stats: stats.accepted_tokens,
            ),
        }
        for name, (about, figure) in gauges.items():
            gauge = GaugeMetricFamily(f"penstock:{name}", about, labels=LABELS)
            for model, (stats, _) in self._engines.items():
                gauge.add_metric([model], figure(stats))
            yield gauge
            replicas = GaugeMetricFamily(
                f"penstock:replica_{name}", f"Of each engine: {about}", labels=[*LABELS, "engine"]
            )
            for model, (stats, _) in self._engines.items():
                for replica, own in enumerate(stats.replicas):
                    replicas.add_metric([model, own.address or str(replica)], figure(own))
            if replicas.samples:
                yield replicas
        by_reason = GaugeMetricFamily(
            "penstock:num_requests_waiting_by_reason",
            "Sequences that wait to be scheduled: for room (capacity), or for a grammar, cached prefixes, keys and "
            "values (deferred).",
            labels=[*LABELS, "reason"],
        )
        steps = HistogramMetricFamily(
            "penstock:iteration_tokens_total", "Tokens that each step computes, drafts included.", labels=LABELS
        )
        for model, (stats, _) in self._engines.items():
            by_reason.add_metric([model, "capacity"], stats.waiting - stats.waiting_prerequisites)
            by_reason.add_metric([model, "deferred"], stats.waiting_prerequisites)
            if stats.steps_by_tokens:
                bounds = [*(f"{bound:.1f}" for bound in BUCKETS), "+Inf"]
                steps.add_metric(
                    [model], [*zip(bounds, accumulate(stats.steps_by_tokens), strict=True)], stats.step_tokens
                )
        yield by_reason
        yield steps
        cache = [*CACHE_OPTIONS, "num_gpu_blocks"]
        info = GaugeMetricFamily(
            "penstock:cache_config_info",
            "Settings of the KV cache, as labels; the value is 1.",
            labels=[*LABELS, *cache],
        )
        for model, (stats, options) in self._engines.items():
            info.add_metric([model, *(str(getattr(options, name)) for name in CACHE_OPTIONS), str(stats.blocks)], 1)
        yield info
        weights = GaugeMetricFamily(
            "penstock:weights_info",
            "Version of the weights, and their folder where it is not the model's; the value is 1.",
            labels=[*LABELS, "engine", "version", "path"],
        )
        updates = CounterMetricFamily(
            "penstock:weights_updates", "Changes of the weights, since the engine started.", labels=LABELS
        )
        for model, (stats, _) in self._engines.items():
            for number, own in enumerate(stats.replicas or [stats]):
                state = own.state
                weights.add_metric([model, own.address or str(number), state.weights_version, state.weights_path], 1)
            updates.add_metric([model], stats.state.weights_updates)
        yield weights
        yield updates
        preemptions = CounterMetricFamily(
            "penstock:num_preemptions",
            "Sequences that lost their KV blocks to others, since the engine started.",
            labels=LABELS,
        )
        for model, (stats, _) in self._engines.items():
            preemptions.add_metric([model], stats.preemptions)
        yield preemptions
        spans = CounterMetricFamily(
            "penstock:engine_trace_spans",
            "Spans of traces of engines: exported to the collector, or dropped as it did not take them.",
            labels=[*LABELS, "outcome"],
        )
        for model, (stats, _) in self._engines.items():
            spans.add_metric([model, "exported"], stats.spans_exported)
            spans.add_metric([model, "dropped"], stats.spans_dropped)
        yield spans
        for name, (about, figure) in drafts.items():
            counter = CounterMetricFamily(f"penstock:{name}", about, labels=LABELS)
            for model, (stats, _) in self._engines.items():
                if stats.accepted_at:
                    counter.add_metric([model], figure(stats))
            yield counter
        for name, about in KV_TRANSFER_COUNTERS.items():
            counter = CounterMetricFamily(f"penstock:kv_transfer_{name}", about, labels=LABELS)
            for model, (stats, _) in self._engines.items():
                counter.add_metric([model], getattr(stats, f"kv_{name}"))
            yield counter
        for name, (field, about) in OFFLOAD_COUNTERS.items():
            counter = CounterMetricFamily(f"penstock:{name}", about, labels=LABELS)
            for model, (stats, _) in self._engines.items():
                counter.add_metric([model], getattr(stats, f"offload_{field}"))
            yield counter
        by_place = CounterMetricFamily(
            "penstock:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that the model accepted, by their position in the draft.",
            labels=[*LABELS, "position"],
        )
        for model, (stats, _) in self._engines.items():
            for place, count in enumerate(stats.accepted_at):
                by_place.add_metric([model, str(place)], count)
        yield by_place
        yield from expert_metrics(self._engines)
        yield from encoder_metrics(self._engines)
