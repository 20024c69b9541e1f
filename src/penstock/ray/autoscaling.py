"""Autoscaling policy of deployments, based on open requests and KV cache usage."""

from __future__ import annotations

import math
from typing import Any

from penstock.engine.service.messages import Stats

KV_CACHE_DEMAND = "kv_cache_demand"
"""Name of the metric that replicas report."""


def autoscaling_stats(stats: Stats) -> dict[str, float]:
    """Metric that a replica reports to Ray Serve: the share of its KV cache that running and queued sequences need,
    assuming that a queued sequence needs as much as a running one. Above 1, sequences wait for blocks."""
    used = stats.blocks_used / max(stats.blocks, 1)
    return {KV_CACHE_DEMAND: used * (1 + stats.waiting / max(stats.running, 1))}


class Autoscaling:
    """Policy that requests enough replicas for both targets. Ray Serve applies bounds, delays and factors.

    - Open requests per replica, queued at proxies or in replicas: at most ``target_ongoing_requests`` (of the
      deployment's ``autoscaling_config``).
    - Mean ``kv_cache_demand`` of the replicas: at most ``target_kv_cache_usage``.
    """

    def __init__(self, target_kv_cache_usage: float = 0.8) -> None:
        self._target_kv_cache_usage = target_kv_cache_usage

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for Ray Serve's ``AutoscalingContext``, and an empty policy state."""
        demands = (context.aggregated_metrics or {}).get(KV_CACHE_DEMAND, {}).values()
        by_requests = context.total_num_requests / context.config.target_ongoing_requests
        by_kv_cache = sum(demands) / self._target_kv_cache_usage
        return math.ceil(max(by_requests, by_kv_cache)), {}
