"""The autoscaling policy of deployments: replicas by open requests and by the use of their KV caches."""

from __future__ import annotations

import math
from typing import Any

from penstock.engine.service.messages import Stats

KV_CACHE_DEMAND = "kv_cache_demand"
"""Name of the figure that replicas report."""


def autoscaling_stats(stats: Stats) -> dict[str, float]:
    """What a replica reports to Ray Serve: the share of its KV cache that its running and its queued sequences would
    take together, where a queued one takes as much as a running one. It exceeds 1 where sequences wait for blocks."""
    used = stats.blocks_used / max(stats.blocks, 1)
    return {KV_CACHE_DEMAND: used * (1 + stats.waiting / max(stats.running, 1))}


class Autoscaling:
    """As many replicas as keep each below both targets. Ray Serve applies bounds, delays and factors.

    - open requests: those that wait at proxies or are open in replicas, at most ``target_ongoing_requests`` a replica
      (of the deployment's ``autoscaling_config``);
    - the KV cache: a mean ``kv_cache_demand`` of at most ``target_kv_cache_usage``.
    """

    def __init__(self, target_kv_cache_usage: float = 0.8) -> None:
        self._target_kv_cache_usage = target_kv_cache_usage

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas that is needed, given Ray Serve's ``AutoscalingContext``, and no state."""
        demands = (context.aggregated_metrics or {}).get(KV_CACHE_DEMAND, {}).values()
        by_requests = context.total_num_requests / context.config.target_ongoing_requests
        by_kv_cache = sum(demands) / self._target_kv_cache_usage
        return math.ceil(max(by_requests, by_kv_cache)), {}
