"""Expert load: balance metrics, and the report for ``penstock plan experts``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.config.options import EngineOptions
from penstock.core.expert_placement import Ranks, balancedness, even_placement, rank_loads, read_placement
from penstock.engine.service.messages import Stats


def expert_report(model: str, stats: Stats, options: EngineOptions) -> dict[str, Any]:
    """Return the tokens of each expert (``ExpertLoadReport``), and of each rank with expert parallelism."""
    layers = stats.expert_load
    report: dict[str, Any] = {
        "model": model,
        "num_experts": max(map(len, layers.values()), default=0),
        "layers": {str(layer): counts for layer, counts in layers.items()},
    }
    if _num_ranks(options) > 1:
        by_layer = {layer: rank_loads(counts, _ranks(layer, counts, options)) for layer, counts in layers.items()}
        report["ranks"] = {str(layer): loads for layer, loads in by_layer.items()}
    return report


def expert_metrics(engines: Mapping[str, tuple[Stats, EngineOptions]]) -> Iterable[Metric]:
    """Compute the metrics of expert load: series per layer and per rank, but not per expert."""
    expert_balance = GaugeMetricFamily(
        "penstock:expert_balancedness",
        "Balance of a layer's experts since the start: mean / maximum of their tokens, 1 is even.",
        labels=["model_name", "layer"],
    )
    rank_balance = GaugeMetricFamily(
        "penstock:expert_rank_balancedness",
        "Balance of a layer's experts over ranks since the start: mean / maximum of the ranks' tokens, 1 is even.",
        labels=["model_name", "layer"],
    )
    tokens = CounterMetricFamily(
        "penstock:expert_rank_tokens",
        "Tokens computed by a rank's experts; a token counts once for each of its experts in each layer.",
        labels=["model_name", "rank"],
    )
    for model, (stats, options) in engines.items():
        totals = [0.0] * _num_ranks(options)
        for layer, counts in stats.expert_load.items():
            expert_balance.add_metric([model, str(layer)], balancedness(counts))
            if len(totals) > 1:
                loads = rank_loads(counts, _ranks(layer, counts, options))
                rank_balance.add_metric([model, str(layer)], balancedness(loads))
                totals = [total + load for total, load in zip(totals, loads, strict=True)]
        if len(totals) > 1 and stats.expert_load:
            for rank, total in enumerate(totals):
                tokens.add_metric([model, str(rank)], total)
    return [family for family in (expert_balance, rank_balance, tokens) if family.samples]


def _num_ranks(options: EngineOptions) -> int:
    """Number of ranks among which experts are distributed."""
    return options.tensor_parallel_size if options.enable_expert_parallel else 1


def _ranks(layer: int, counts: list[int], options: EngineOptions) -> Ranks:
    numbers = len(counts), _num_ranks(options), options.num_redundant_experts
    return _placement(options.expert_placement, *numbers).get(layer) or _even(*numbers)


@lru_cache(8)
def _placement(path: str, num_experts: int, ranks: int, redundant: int) -> dict[int, Ranks]:
    return read_placement(path, num_experts, ranks, redundant).layers if path else {}


_even = lru_cache(8)(even_placement)
