"""Metrics of the features of images and videos that engines keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.config.options import EngineOptions
from penstock.engine.service.messages import Stats

COUNTERS = {
    "mm_cache_queries": ("queries", "Images and pairs of frames whose features steps needed, kept or not."),
    "mm_cache_hits": ("hits", "Those whose features were kept (encoder_cache_size), and not computed again."),
}
"""By name: field of ``Stats`` after ``encoder_``, and description."""
GAUGES = {
    "encoder_cache_entries": ("entries", "Images and pairs of frames whose features are kept."),
    "encoder_cache_tokens": ("tokens", "Features that are kept, of encoder_cache_size."),
    "encoder_cache_bytes": ("bytes", "Bytes of the features that are kept, on each worker."),
}
"""Likewise."""


def encoder_metrics(engines: Mapping[str, tuple[Stats, EngineOptions]]) -> Iterable[Metric]:
    """A series for each model."""
    for kind, metrics in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
        for name, (field, about) in metrics.items():
            family = kind(f"penstock:{name}", about, labels=["model_name"])
            for model, (stats, _) in engines.items():
                family.add_metric([model], getattr(stats, f"encoder_{field}"))
            yield family
