"""What the live view shows: each model's counters and histograms, and what its engines are doing."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from ..models.served_models import ServedModels

COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "requests",
    "num_requests_open",
)
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")


async def live_view(served_models: ServedModels) -> dict[str, Any]:
    """State of all models: ``counters`` (number by name), ``histograms`` (``buckets``, upper bounds in seconds, and
    the observations in each), and ``engines`` with ``stats`` and a ``snapshot`` (None where an engine does not answer).
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    families = {family.name.removeprefix("penstock:"): family for family in registry.collect()}
    models = []
    for service in served_models:
        pool = service.gateway.engine_pool
        stats, asked = pool.stats, await pool.inspect()
        engines = [
            {"address": address, "role": role, "stats": own, "snapshot": snapshot}
            for (address, role, snapshot), own in zip(asked, stats.replicas or [stats], strict=False)
        ]
        counters = {name: _total(families.get(name), service.name) for name in COUNTERS}
        histograms = {name: _histogram(families.get(name), service.name) for name in HISTOGRAMS}
        models.append({"name": service.name, "counters": counters, "histograms": histograms, "engines": engines})
    result: dict[str, Any] = msgspec.to_builtins({"time": time.time(), "models": models})
    return result


def _total(family: Metric | None, model: str) -> float:
    """The value of a counter or gauge of a model."""
    samples = family.samples if family else []
    return float(sum(one.value for one in samples if one.labels.get("model_name") == model))


def _histogram(family: Metric | None, model: str) -> dict[str, list[Any]]:
    """The observations of a model, by bucket."""
    samples = family.samples if family else []
    counts = [
        (one.labels["le"], one.value)
        for one in samples
        if one.name.endswith("_bucket") and one.labels.get("model_name") == model
    ]
    before = [0.0, *(count for _, count in counts)]
    return {
        "buckets": [None if bound == "+Inf" else float(bound) for bound, _ in counts],
        "counts": [count - less for (_, count), less in zip(counts, before, strict=False)],
    }
