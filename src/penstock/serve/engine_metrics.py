"""Prometheus metrics computed from the statistics of engines."""

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
"""Latest statistics and options of each model's engine, by model name."""
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Label values (without the model's name) and value of each sample."""
CACHE_OPTIONS = ("block_size", "kv_cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "swap_space")
"""Options shown as labels of the metric ``cache_config_info``."""


class Family(NamedTuple):
    """A metric computed from engine statistics."""

    name: str
    about: str
    samples: Callable[[Stats, EngineOptions], Samples]
    labels: tuple[str, ...] = ()
    is_counter: bool = False

    def metric(self, engines: EngineStats) -> Metric:
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        metric = kind(f"penstock:{self.name}", self.about, labels=[*LABELS, *self.labels])
        for model, (stats, options) in engines.items():
            for labels, value in self.samples(stats, options):
                metric.add_metric([model, *labels], value)
        return metric


def _one(value: Callable[[Stats], float]) -> Callable[[Stats, EngineOptions], Samples]:
    """Function that returns one sample, with the model name as its only label."""
    return lambda stats, options: [((), value(stats))]


def _counter(name: str, about: str, value: Callable[[Stats], float]) -> Family:
    return Family(name, about, _one(value), is_counter=True)


def _draft_counter(name: str, about: str, value: Callable[[Stats], float]) -> Family:
    """Counter that only engines with speculative decoding report."""
    return Family(
        name, about, lambda stats, options: [((), value(stats))] if stats.accepted_at else [], is_counter=True
    )


def _field(field: str) -> Callable[[Stats], float]:
    return lambda stats: getattr(stats, field)


GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "num_requests_running": ("Sequences that the engine is computing.", _field("running")),
    "num_requests_waiting": ("Sequences waiting to be scheduled.", _field("waiting")),
    "num_requests_swapped": ("Preempted sequences with their KV blocks in host memory.", _field("num_swapped")),
    "kv_cache_usage_perc": (
        "Fraction of the KV cache blocks in use, 0 to 1.",
        lambda stats: stats.blocks_used / max(stats.blocks, 1),
    ),
    "kv_blocks": ("Number of KV cache blocks.", _field("blocks")),
    "kv_blocks_used": ("KV cache blocks in use by sequences.", _field("blocks_used")),
    "kv_blocks_free": (
        "KV cache blocks not in use by sequences, including cached prefixes.",
        lambda stats: stats.blocks - stats.blocks_used,
    ),
    "state_snapshots": ("Snapshots of recurrent states.", _field("state_snapshots")),
    "state_snapshots_used": (
        "Snapshots with a recurrent state that the prefix cache can use.",
        _field("state_snapshots_used"),
    ),
    "kv_transfer_slots": (
        "Slots of the KV transfer buffers (prefill/decode disaggregation).",
        _field("kv_slots"),
    ),
    "kv_transfer_slots_used": ("Slots of the KV transfer buffers in use.", _field("kv_slots_used")),
    "kv_offload_cpu_cache_usage_perc": (
        "Fraction of the host memory for cached prefixes in use, 0 to 1.",
        lambda stats: stats.offload_slots_used / max(stats.offload_slots, 1),
    ),
    "engine_heartbeat_age_seconds": ("Seconds since the last iteration of the engine's loop.", _field("heartbeat_age")),
    "engine_paused": ("1 if the engine is paused, else 0.", lambda stats: stats.state.is_paused),
    "engine_asleep": (
        "1 if the engine has freed its KV cache or weights (sleep mode), else 0.",
        lambda stats: bool(stats.state.asleep),
    ),
    "engine_longest_step_seconds": (
        "Longest step since the engine started, in seconds.",
        _field("longest_step"),
    ),
}
"""Description and value of each gauge, by name. Each gauge is also reported per replica, as ``replica_NAME``."""
KV_TRANSFER_COUNTERS = {
    "transfers": "KV transfers started by decode engines.",
    "completed": "KV transfers that completed.",
    "failed": "KV transfers that failed.",
    "recomputed": "Requests with a prompt that the decode engine computed because the KV transfer failed.",
    "seconds": "Time of completed KV transfers, including queueing and computation in the prefill engine.",
    "bytes_received": "Bytes of KV received from prefill engines.",
    "bytes_sent": "Bytes of KV sent to decode engines over TCP.",
    "rereads": "Parts of KV transfers that were read again.",
    "checksum_failures": "Parts of KV transfers with a wrong checksum.",
}
"""Description of each counter, by field of ``Stats`` without ``kv_``."""
OFFLOAD_COUNTERS = {
    "external_prefix_cache_queries": (
        "queries",
        "Prompt tokens not found in the KV cache and looked up in host memory (kv_offloading_size).",
    ),
    "external_prefix_cache_hits": ("hits", "Prompt tokens found in host memory; also counted in prefix_cache_hits."),
    "kv_offload_store_bytes": ("bytes_stored", "Bytes of cached prefixes copied from the KV cache to host memory."),
    "kv_offload_load_bytes": ("bytes_loaded", "Bytes of cached prefixes copied from host memory to the KV cache."),
    "kv_offload_evictions": ("evictions", "KV blocks of cached prefixes evicted from host memory."),
    "kv_offload_disk_hits": ("disk_hits", "Prompt tokens read from disk (kv_offloading_disk_path)."),
    "kv_offload_disk_read_bytes": ("disk_bytes_read", "Bytes of cached prefixes read from disk."),
    "kv_offload_disk_write_bytes": ("disk_bytes_written", "Bytes of cached prefixes written to disk."),
    "kv_offload_disk_evictions": ("disk_evictions", "Files of cached prefixes deleted to free disk space."),
    "kv_offload_disk_read_failures": (
        "disk_read_failures",
        "Failed reads of cached prefixes from disk: damaged files and timeouts.",
    ),
    "kv_offload_disk_write_failures": ("disk_write_failures", "KV blocks that could not be written to disk."),
}
"""Field of ``Stats`` (without ``offload_``) and description of each counter, by name."""
ENCODER_COUNTERS = {
    "mm_cache_queries": ("queries", "Images and pairs of video frames looked up in the encoder cache."),
    "mm_cache_hits": ("hits", "Images and pairs of video frames found in the encoder cache (encoder_cache_size)."),
}
"""Field of ``Stats`` (without ``encoder_``) and description of each counter, by name."""
ENCODER_GAUGES = {
    "encoder_cache_entries": ("entries", "Images and pairs of video frames in the encoder cache."),
    "encoder_cache_tokens": ("tokens", "Features (tokens) in the encoder cache, at most encoder_cache_size."),
    "encoder_cache_bytes": ("bytes", "Size of the encoder cache on each worker, in bytes."),
}
"""Field of ``Stats`` (without ``encoder_``) and description of each gauge, by name."""
FAMILIES = (
    Family(
        "num_requests_waiting_by_reason",
        "Sequences waiting to be scheduled: for capacity, or for a grammar, cached prefixes or a KV transfer "
        "(deferred).",
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
        "Version of the weights, and their folder if it is not the model's; the value is 1.",
        lambda stats, options: [
            ((replica.address or str(number), replica.state.weights_version, replica.state.weights_path), 1)
            for number, replica in enumerate(stats.replicas or [stats])
        ],
        ("engine", "version", "path"),
    ),
    _counter(
        "weights_updates",
        "Weight updates since the engine started.",
        lambda stats: stats.state.weights_updates,
    ),
    _counter(
        "num_preemptions",
        "Preempted sequences since the engine started.",
        _field("preemptions"),
    ),
    Family(
        "engine_trace_spans",
        "Trace spans of engines: exported to the collector, or dropped because it did not accept them.",
        lambda stats, options: [(("exported",), stats.spans_exported), (("dropped",), stats.spans_dropped)],
        ("outcome",),
        is_counter=True,
    ),
    _draft_counter(
        "spec_decode_num_drafts",
        "Drafts: proposals of tokens for a sequence by speculative decoding.",
        _field("drafts"),
    ),
    _draft_counter(
        "spec_decode_num_draft_tokens",
        "Draft tokens proposed by speculative decoding.",
        _field("draft_tokens"),
    ),
    _draft_counter(
        "spec_decode_num_accepted_tokens",
        "Draft tokens accepted by the model.",
        _field("accepted_tokens"),
    ),
    _draft_counter(
        "spec_decode_num_sequence_steps",
        "Steps of sequences after their first token; each gives one token and the accepted draft tokens.",
        _field("decoded_rows"),
    ),
    _draft_counter(
        "spec_decode_decode_seconds",
        "Duration of the steps without prompt tokens.",
        _field("decode_seconds"),
    ),
    _draft_counter(
        "spec_decode_decode_seconds_without_drafts",
        "Estimated duration without drafts of the tokens of the steps without prompt tokens.",
        _field("seconds_without_drafts"),
    ),
    *(_counter(f"kv_transfer_{name}", about, _field(f"kv_{name}")) for name, about in KV_TRANSFER_COUNTERS.items()),
    *(_counter(name, about, _field(f"offload_{field}")) for name, (field, about) in OFFLOAD_COUNTERS.items()),
    Family(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted by the model, by position in the draft.",
        lambda stats, options: [((str(place),), count) for place, count in enumerate(stats.accepted_at)],
        ("position",),
        is_counter=True,
    ),
    *(_counter(name, about, _field(f"encoder_{field}")) for name, (field, about) in ENCODER_COUNTERS.items()),
    *(Family(name, about, _one(_field(f"encoder_{field}"))) for name, (field, about) in ENCODER_GAUGES.items()),
)


def engine_metrics(engines: EngineStats) -> Iterator[Metric]:
    """Compute the metrics of all engines."""
    for name, (about, value) in GAUGES.items():
        yield Family(name, about, _one(value)).metric(engines)
        replicas = Family(f"replica_{name}", f"Per engine: {about}", _by_replica(value), ("engine",))
        if (metric := replicas.metric(engines)).samples:
            yield metric
    yield _steps(engines)
    for family in FAMILIES:
        yield family.metric(engines)


def _by_replica(value: Callable[[Stats], float]) -> Callable[[Stats, EngineOptions], Samples]:
    return lambda stats, options: [
        ((replica.address or str(number),), value(replica)) for number, replica in enumerate(stats.replicas)
    ]


def _steps(engines: EngineStats) -> Metric:
    steps = HistogramMetricFamily(
        "penstock:iteration_tokens_total", "Tokens computed per step, including draft tokens.", labels=LABELS
    )
    bounds = [*(f"{bound:.1f}" for bound in BUCKETS), "+Inf"]
    for model, (stats, _) in engines.items():
        if stats.steps_by_tokens:
            buckets = [*zip(bounds, accumulate(stats.steps_by_tokens), strict=True)]
            steps.add_metric([model], buckets, stats.step_tokens)
    return steps
