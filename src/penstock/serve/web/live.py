"""Data of the live view: counters and histograms of each model, and the state of its engines."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from prometheus_client import Metric

from ..metrics import process_metrics
from ..models.served_models import ServedModels

INTERVAL = 0.5
"""Minimum time between two computations of the state in seconds; each costs the engines a few milliseconds."""
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "requests",
    "num_requests_open",
    "requests_resumed",
)
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")


async def state_of(served_models: ServedModels) -> bytes:
    """Return the state of all models as JSON.

    ``models`` is a list of objects with ``counters`` (name → value), ``histograms`` (``buckets``, the upper bounds in
    seconds, and ``counts``) and ``engines``, each with ``stats`` and ``snapshot`` (null if the engine does not answer).
    """
    families = {family.name.removeprefix("penstock:"): family for family in await asyncio.to_thread(process_metrics)}
    models = []
    for service in served_models:
        engines = [
            {"address": stats.address, "role": stats.role, "stats": stats, "snapshot": snapshot}
            for stats, snapshot in await service.gateway.engine_pool.inspect()
        ]
        counters = {name: _total(families.get(name), service.name) for name in COUNTERS}
        histograms = {name: _histogram(families.get(name), service.name) for name in HISTOGRAMS}
        models.append({"name": service.name, "counters": counters, "histograms": histograms, "engines": engines})
    return msgspec.json.encode({"time": time.time(), "models": models})


def _total(family: Metric | None, model: str) -> float:
    """Value of a model's counter or gauge."""
    samples = family.samples if family else []
    return float(sum(one.value for one in samples if one.labels.get("model_name") == model))


def _histogram(family: Metric | None, model: str) -> dict[str, list[Any]]:
    """Buckets and counts of a model's histogram."""
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
