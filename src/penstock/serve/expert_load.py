"""How even the load of experts is, as metrics, and the report that ``penstock plan experts`` reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.config.options import EngineOptions
from penstock.core.expert_placement import Ranks, balancedness, even_placement, rank_loads, read_placement
from penstock.engine.service.messages import Stats


def expert_report(model: str, stats: Stats, options: EngineOptions) -> dict[str, Any]:
    """The tokens of each expert: an ``ExpertLoadReport``, and the same by rank where ranks have whole experts."""
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
    """A series for each layer and each rank, and none for each expert."""
    of_experts = GaugeMetricFamily(
        "penstock:expert_balancedness",
        "Tokens of a layer's experts since the start, mean over maximum: 1 is even.",
        labels=["model_name", "layer"],
    )
    of_ranks = GaugeMetricFamily(
        "penstock:expert_rank_balancedness",
        "Tokens of a layer's experts on each rank since the start, mean over maximum: 1 is even.",
        labels=["model_name", "layer"],
    )
    tokens = CounterMetricFamily(
        "penstock:expert_rank_tokens",
        "Tokens that a rank's experts have computed, one for each of a token's experts in each layer.",
        labels=["model_name", "rank"],
    )
    for model, (stats, options) in engines.items():
        totals = [0.0] * _num_ranks(options)
        for layer, counts in stats.expert_load.items():
            of_experts.add_metric([model, str(layer)], balancedness(counts))
            if len(totals) > 1:
                loads = rank_loads(counts, _ranks(layer, counts, options))
                of_ranks.add_metric([model, str(layer)], balancedness(loads))
                totals = [total + own for total, own in zip(totals, loads, strict=True)]
        if len(totals) > 1 and stats.expert_load:
            for rank, total in enumerate(totals):
                tokens.add_metric([model, str(rank)], total)
    return [family for family in (of_experts, of_ranks, tokens) if family.samples]


def _num_ranks(options: EngineOptions) -> int:
    """Ranks that have whole experts."""
    return options.tensor_parallel_size if options.enable_expert_parallel else 1


def _ranks(layer: int, counts: list[int], options: EngineOptions) -> Ranks:
    numbers = len(counts), _num_ranks(options), options.num_redundant_experts
    return _placement(options.expert_placement, *numbers).get(layer) or _even(*numbers)


@lru_cache(8)
def _placement(path: str, num_experts: int, ranks: int, redundant: int) -> dict[int, Ranks]:
    return read_placement(path, num_experts, ranks, redundant).layers if path else {}


_even = lru_cache(8)(even_placement)
