"""Prometheus metrics, under the names that vLLM's have, one page over all API processes.

Each process counts in files of its own in the folder that ``PROMETHEUS_MULTIPROC_DIR`` names, where any of them can add
them up; what the engine knows is read from the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.core import Failure, SamplingParams
from penstock.core.options import EngineOptions
from penstock.core.profiles import Figure
from penstock.engine import wire
from penstock.frontend.outputs import RequestOutput

FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
OF_CACHE = ("block_size", "kv_cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")
"""Options that are told of the KV cache."""
PLAIN = ("counter", "gauge")
"""Kinds of metrics that are one number."""


LABELS = ["model_name"]
Engines = Mapping[str, tuple[wire.Stats, EngineOptions]]
"""By model, what its engine told last, and its options."""


class Metrics:
    """Of a server's requests.

    Args:
        others: another system's names, as in its profile.
    """

    def __init__(self, others: Mapping[str, str | Figure] | None = None) -> None:
        self._others = others or {}

        def counter(name: str, about: str, *more: str) -> Counter:
            return Counter(f"penstock:{name}", about, [*LABELS, *more])

        def histogram(name: str, about: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"penstock:{name}", about, LABELS, buckets=list(buckets))

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found there.")
        self.requests = counter("requests", "Requests that came to be answered.")
        self.hit_requests = counter("prefix_cache_hit_requests", "Requests with prompt tokens found there.")
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self.between = histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", PER_TOKEN)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "A request's mean time for a token after the first.", PER_TOKEN
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", WHOLE)
        self.queued = histogram("request_queue_time_seconds", "From arrival until it ran first.", WHOLE)
        self.ran = histogram("request_inference_time_seconds", "From when it ran first to the last token.", WHOLE)
        self.prefilled = histogram("request_prefill_time_seconds", "From when it ran first to the first token.", WHOLE)
        self.decoded = histogram("request_decode_time_seconds", "From the first token to the last.", WHOLE)
        self.asked_for = histogram("request_params_max_tokens", "Tokens that a request allows, if it says.", TOKENS)
        self.prompts = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generations = histogram("request_generation_tokens", "Tokens generated for a request.", TOKENS)
        self.success = counter("request_success", "Sequences that came to their end.", "finished_reason")
        self.failures = Counter("penstock:request_failures", "Requests that were not answered.", ["code"])
        self.responses = Counter("penstock:http_responses", "HTTP responses.", ["path", "status"])
        self.open = Gauge("penstock:num_requests_open", "Requests being answered.", LABELS, multiprocess_mode="livesum")

    def of(self, model: str) -> ModelMetrics:
        """A model's own."""
        return ModelMetrics(self, model)

    def failed(self, failure: Failure) -> None:
        self.failures.labels(code=failure.code.value).inc()

    def page(self, engines: Engines) -> bytes:
        """The page, with what each model's engine told last."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        registry.register(_Engines(engines))
        others = CollectorRegistry()
        others.register(_Others(registry, self._others, engines))
        page: bytes = generate_latest(registry) + generate_latest(others)
        return page


class ModelMetrics:
    """Of the requests of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._cache_queries = metrics.cache_queries.labels(model)
        self._cache_hits = metrics.cache_hits.labels(model)
        self._requests = metrics.requests.labels(model)
        self._hit_requests = metrics.hit_requests.labels(model)
        self._first_token = metrics.first_token.labels(model)
        self._between = metrics.between.labels(model)
        self._per_token = metrics.per_token.labels(model)
        self._whole = metrics.whole.labels(model)
        self._queued = metrics.queued.labels(model)
        self._ran = metrics.ran.labels(model)
        self._prefilled = metrics.prefilled.labels(model)
        self._decoded = metrics.decoded.labels(model)
        self._asked_for = metrics.asked_for.labels(model)
        self._prompts = metrics.prompts.labels(model)
        self._generations = metrics.generations.labels(model)
        self._success = partial(metrics.success.labels, model)
        self.open = metrics.open.labels(model)

    def came(self, sampling: SamplingParams) -> None:
        """A request is there to be answered."""
        self._requests.inc()
        if sampling.max_tokens is not None:
            self._asked_for.observe(sampling.max_tokens)

    def began(self, output: RequestOutput) -> None:
        """The first token of a request is there."""
        times, prompt = output.times, len(output.prompt_token_ids)
        assert times.first_token is not None
        self._prompt_tokens.inc(prompt)
        self._cache_queries.inc(prompt)
        self._cache_hits.inc(output.num_cached_tokens)
        self._hit_requests.inc(bool(output.num_cached_tokens))
        self._first_token.observe(times.first_token - times.arrived)
        self._queued.observe(times.queued)

    def generated(self, tokens: int, seconds: float | None) -> None:
        """Some tokens more, after so many seconds; None where they are the first."""
        self._generation_tokens.inc(tokens)
        if seconds is not None:
            self._between.observe(seconds / tokens)

    def ended(self, output: RequestOutput) -> None:
        """All sequences of a request have come to their end."""
        times, tokens = output.times, sum(len(made.token_ids) for made in output.outputs)
        for made in output.outputs:
            self._success(made.finish_reason).inc()
        self._prompts.observe(len(output.prompt_token_ids))
        self._generations.observe(tokens)
        if times.first_token is not None and times.last_token is not None:
            self._whole.observe(times.last_token - times.arrived)
            began = times.arrived + times.queued
            self._ran.observe(times.last_token - began)
            self._prefilled.observe(times.first_token - began)
            self._decoded.observe(times.last_token - times.first_token)
            each = max(len(made.token_ids) for made in output.outputs)
            if each > 1:
                self._per_token.observe((times.last_token - times.first_token) / (each - 1))


class _Others:
    """Metrics under other names, and figures that are made of ours."""

    def __init__(self, registry: CollectorRegistry, names: Mapping[str, str | Figure], engines: Engines) -> None:
        self._registry = registry
        self._names = names
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        ours = {family.name.removeprefix("penstock:"): family for family in self._registry.collect()}
        for name, own in self._names.items():
            if not isinstance(own, str):
                figure = GaugeMetricFamily(name, "Made of ours.", labels=LABELS)
                for model, (_, options) in self._engines.items():
                    figure.add_metric([model], own(_totals(ours, model), options))
                yield figure
            elif family := ours.get(own):
                renamed = Metric(name, family.documentation, family.type)
                renamed.samples = [s._replace(name=name + s.name.removeprefix(family.name)) for s in family.samples]
                yield renamed


def _totals(ours: Mapping[str, Metric], model: str) -> dict[str, float]:
    """Of a model's metrics that are one number."""
    return {
        name: sum(sample.value for sample in found.samples if sample.labels.get("model_name", model) == model)
        for name, found in ours.items()
        if found.type in PLAIN
    }


class _Engines:
    """The engines' own figures."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        gauges: dict[str, tuple[str, Callable[[wire.Stats], float]]] = {
            "num_requests_running": ("Sequences that run.", lambda stats: stats.running),
            "num_requests_waiting": ("Sequences that wait.", lambda stats: stats.waiting),
            "kv_cache_usage_perc": (
                "Share of the KV blocks in use, 0 to 1.",
                lambda stats: stats.blocks_used / max(stats.blocks, 1),
            ),
            "kv_blocks": ("KV blocks.", lambda stats: stats.blocks),
            "kv_blocks_used": ("KV blocks in use.", lambda stats: stats.blocks_used),
            "kv_blocks_free": ("KV blocks that nobody holds.", lambda stats: stats.blocks - stats.blocks_used),
        }
        guesses: dict[str, tuple[str, Callable[[wire.Stats], float]]] = {
            "spec_decode_num_drafts": ("Times that tokens were guessed ahead.", lambda stats: stats.drafts),
            "spec_decode_num_draft_tokens": ("Tokens guessed.", lambda stats: stats.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Tokens guessed rightly.", lambda stats: stats.accepted_tokens),
        }
        for name, (about, figure) in gauges.items():
            gauge = GaugeMetricFamily(f"penstock:{name}", about, labels=LABELS)
            for model, (stats, _) in self._engines.items():
                gauge.add_metric([model], figure(stats))
            yield gauge
        cache = [*OF_CACHE, "num_gpu_blocks"]
        info = GaugeMetricFamily("penstock:cache_config_info", "How the KV cache is set up.", labels=[*LABELS, *cache])
        for model, (stats, options) in self._engines.items():
            info.add_metric([model, *(str(getattr(options, name)) for name in OF_CACHE), str(stats.blocks)], 1)
        yield info
        preemptions = CounterMetricFamily(
            "penstock:num_preemptions", "Preemptions since the engine started.", labels=LABELS
        )
        for model, (stats, _) in self._engines.items():
            preemptions.add_metric([model], stats.preemptions)
        yield preemptions
        for name, (about, figure) in guesses.items():
            counter = CounterMetricFamily(f"penstock:{name}", about, labels=LABELS)
            for model, (stats, _) in self._engines.items():
                if stats.accepted_at:
                    counter.add_metric([model], figure(stats))
            yield counter
        by_place = CounterMetricFamily(
            "penstock:spec_decode_num_accepted_tokens_per_pos",
            "Tokens guessed rightly, by how many were guessed before each.",
            labels=[*LABELS, "position"],
        )
        for model, (stats, _) in self._engines.items():
            for place, count in enumerate(stats.accepted_at):
                by_place.add_metric([model, str(place)], count)
        yield by_place
