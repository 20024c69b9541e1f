"""The statistics of engines as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.config.options import EngineOptions
from penstock.engine.service.messages import Stats
from penstock.engine.step_statistics import BUCKETS

LABELS = ["model_name"]
EngineStats = Mapping[str, tuple[Stats, EngineOptions]]
"""By model: the last statistics of its engine, and its options."""
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of further labels besides the model's name, and the figure."""
CACHE_OPTIONS = ("block_size", "kv_cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")
"""Options in ``cache_config_info``."""


class Family(NamedTuple):
    """A metric whose samples are read from an engine's statistics."""

    name: str
    about: str
    samples: Callable[[Stats, EngineOptions], Samples]
    labels: tuple[str, ...] = ()
    is_counter: bool = False

    def metric(self, engines: EngineStats) -> Metric:
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        metric = kind(f"penstock:{self.name}", self.about, labels=[*LABELS, *self.labels])
        for model, (stats, options) in engines.items():
            for values, figure in self.samples(stats, options):
                metric.add_metric([model, *values], figure)
        return metric


def _one(figure: Callable[[Stats], float]) -> Callable[[Stats, EngineOptions], Samples]:
    """The samples of a metric without further labels."""
    return lambda stats, options: [((), figure(stats))]


def _counter(name: str, about: str, figure: Callable[[Stats], float]) -> Family:
    return Family(name, about, _one(figure), is_counter=True)


def _draft_counter(name: str, about: str, figure: Callable[[Stats], float]) -> Family:
    """A counter of engines with speculative decoding."""
    return Family(
        name, about, lambda stats, options: [((), figure(stats))] if stats.accepted_at else [], is_counter=True
    )


def _field(field: str) -> Callable[[Stats], float]:
    return lambda stats: getattr(stats, field)


GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "num_requests_running": ("Sequences that the engine is computing now.", _field("running")),
    "num_requests_waiting": ("Sequences that wait to be scheduled.", _field("waiting")),
    "num_requests_swapped": ("Preempted sequences whose KV blocks are in host memory.", _field("num_swapped")),
    "kv_cache_usage_perc": (
        "Share of the KV cache's blocks in use, 0 to 1.",
        lambda stats: stats.blocks_used / max(stats.blocks, 1),
    ),
    "kv_blocks": ("Blocks of the KV cache.", _field("blocks")),
    "kv_blocks_used": ("Blocks of the KV cache that sequences hold.", _field("blocks_used")),
    "kv_blocks_free": (
        "Blocks of the KV cache that no sequence holds, cached prefixes among them.",
        lambda stats: stats.blocks - stats.blocks_used,
    ),
    "kv_transfer_slots": (
        "Slots of the transfer buffers of separate prefill and decode instances.",
        _field("kv_slots"),
    ),
    "kv_transfer_slots_used": ("Those that KV transfers hold.", _field("kv_slots_used")),
    "kv_offload_cpu_cache_usage_perc": (
        "Share of the host memory for cached prefixes that holds some, 0 to 1.",
        lambda stats: stats.offload_slots_used / max(stats.offload_slots, 1),
    ),
    "engine_heartbeat_age_seconds": ("Seconds since the engine's loop last came round.", _field("heartbeat_age")),
    "engine_paused": ("Whether the engine computes no steps now, 0 or 1.", lambda stats: stats.state.is_paused),
    "engine_asleep": (
        "Whether the engine has freed its KV cache or weights, 0 or 1.",
        lambda stats: bool(stats.state.asleep),
    ),
    "engine_longest_step_seconds": (
        "Longest step since the engine started, in seconds.",
        _field("longest_step"),
    ),
}
"""By name: description and figure. Each is also told of each replica, under ``replica_NAME``."""
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
ENCODER_COUNTERS = {
    "mm_cache_queries": ("queries", "Images and pairs of frames whose features steps needed, kept or not."),
    "mm_cache_hits": ("hits", "Those whose features were kept (encoder_cache_size), and not computed again."),
}
"""Counters of engines: field of ``Stats`` after ``encoder_``, and description."""
ENCODER_GAUGES = {
    "encoder_cache_entries": ("entries", "Images and pairs of frames whose features are kept."),
    "encoder_cache_tokens": ("tokens", "Features that are kept, of encoder_cache_size."),
    "encoder_cache_bytes": ("bytes", "Bytes of the features that are kept, on each worker."),
}
"""Gauges, likewise."""
FAMILIES = (
    Family(
        "num_requests_waiting_by_reason",
        "Sequences that wait to be scheduled: for room (capacity), or for a grammar, cached prefixes, keys and "
        "values (deferred).",
        lambda stats, options: [
            (("capacity",), stats.waiting - stats.waiting_prerequisites),
            (("deferred",), stats.waiting_prerequisites),
        ],
        ("reason",),
    ),
    Family(
        "cache_config_info",
        "Settings of the KV cache, as labels; the value is 1.",
        lambda stats, options: [
            ((*(str(getattr(options, name)) for name in CACHE_OPTIONS), str(stats.blocks)), 1),
        ],
        (*CACHE_OPTIONS, "num_gpu_blocks"),
    ),
    Family(
        "weights_info",
        "Version of the weights, and their folder where it is not the model's; the value is 1.",
        lambda stats, options: [
            ((own.address or str(number), own.state.weights_version, own.state.weights_path), 1)
            for number, own in enumerate(stats.replicas or [stats])
        ],
        ("engine", "version", "path"),
    ),
    _counter(
        "weights_updates",
        "Changes of the weights, since the engine started.",
        lambda stats: stats.state.weights_updates,
    ),
    _counter(
        "num_preemptions",
        "Sequences that lost their KV blocks to others, since the engine started.",
        _field("preemptions"),
    ),
    Family(
        "engine_trace_spans",
        "Spans of traces of engines: exported to the collector, or dropped as it did not take them.",
        lambda stats, options: [(("exported",), stats.spans_exported), (("dropped",), stats.spans_dropped)],
        ("outcome",),
        is_counter=True,
    ),
    _draft_counter(
        "spec_decode_num_drafts",
        "Drafts: times that tokens were proposed for a sequence by speculative decoding.",
        _field("drafts"),
    ),
    _draft_counter(
        "spec_decode_num_draft_tokens",
        "Draft tokens proposed by speculative decoding.",
        _field("draft_tokens"),
    ),
    _draft_counter(
        "spec_decode_num_accepted_tokens",
        "Draft tokens that the model accepted.",
        _field("accepted_tokens"),
    ),
    *(_counter(f"kv_transfer_{name}", about, _field(f"kv_{name}")) for name, about in KV_TRANSFER_COUNTERS.items()),
    *(_counter(name, about, _field(f"offload_{field}")) for name, (field, about) in OFFLOAD_COUNTERS.items()),
    Family(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that the model accepted, by their position in the draft.",
        lambda stats, options: [((str(place),), count) for place, count in enumerate(stats.accepted_at)],
        ("position",),
        is_counter=True,
    ),
    *(_counter(name, about, _field(f"encoder_{field}")) for name, (field, about) in ENCODER_COUNTERS.items()),
    *(Family(name, about, _one(_field(f"encoder_{field}"))) for name, (field, about) in ENCODER_GAUGES.items()),
)


def engine_metrics(engines: EngineStats) -> Iterator[Metric]:
    """The statistics of all engines."""
    for name, (about, figure) in GAUGES.items():
        yield Family(name, about, _one(figure)).metric(engines)
        replicas = Family(f"replica_{name}", f"Of each engine: {about}", _by_replica(figure), ("engine",))
        if (metric := replicas.metric(engines)).samples:
            yield metric
    yield _steps(engines)
    for family in FAMILIES:
        yield family.metric(engines)


def _by_replica(figure: Callable[[Stats], float]) -> Callable[[Stats, EngineOptions], Samples]:
    return lambda stats, options: [
        ((own.address or str(number),), figure(own)) for number, own in enumerate(stats.replicas)
    ]


def _steps(engines: EngineStats) -> Metric:
    steps = HistogramMetricFamily(
        "penstock:iteration_tokens_total", "Tokens that each step computes, drafts included.", labels=LABELS
    )
    bounds = [*(f"{bound:.1f}" for bound in BUCKETS), "+Inf"]
    for model, (stats, _) in engines.items():
        if stats.steps_by_tokens:
            buckets = [*zip(bounds, accumulate(stats.steps_by_tokens), strict=True)]
            steps.add_metric([model], buckets, stats.step_tokens)
    return steps
