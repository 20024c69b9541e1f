"""Which rank has which experts: of whole experts the neighbours, or as planned from their load.

The plan is that of DeepSeek's EPLB (DeepSeek-AI, 2025) for one group of ranks: the experts with the most tokens for a
replica get another one, then replicas go to the ranks with the least to do, the heaviest first. Of ``expert parallel
load balancing`` in other systems it has the terms: a redundant expert is a replica more; balancedness is the mean over
the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.core.errors import invalid
from penstock.core.json_files import read_text_file

T = TypeVar("T")
Ranks = list[list[int]]
"""The experts of each rank."""


class ExpertPlacement(msgspec.Struct, kw_only=True):
    """The experts of each rank in a model's layers."""

    num_experts: int
    layers: dict[int, Ranks]
    """Layers that are missing are as ``even_placement`` says."""


class ExpertLoadReport(msgspec.Struct, kw_only=True):
    """Tokens that chose each expert."""

    num_experts: int
    layers: dict[int, list[int]]
    """By layer ``[experts]``."""
    model: str = ""


def neighbours(num_experts: int, ranks: int) -> Ranks:
    """Each rank's experts, which are neighbours."""
    ends = [num_experts * rank // ranks for rank in range(ranks + 1)]
    return [list(range(*pair)) for pair in pairwise(ends)]


def even_placement(num_experts: int, ranks: int, redundant: int = 0) -> Ranks:
    """The placement without a plan: neighbours, or with redundant experts that of a load which all share equally."""
    return place([1] * num_experts, ranks, redundant) if redundant else neighbours(num_experts, ranks)


def place(load: Sequence[int], ranks: int, redundant: int = 0) -> Ranks:
    """Plan a layer.

    Args:
        load: tokens of each expert.
        redundant: replicas besides the first one of each expert.

    Raises ``PenstockError`` (``invalid``) where ranks have no experts, or more replicas than there are experts.
    """
    check_sizes(len(load), ranks, redundant)
    replicas = [1] * len(load)
    for _ in range(redundant):
        wanted = [expert for expert, count in enumerate(replicas) if count < ranks]
        replicas[max(wanted, key=lambda expert: (load[expert] / replicas[expert], -replicas[expert], -expert))] += 1
    rooms = [(len(load) + redundant + rank) // ranks for rank in reversed(range(ranks))]
    placement: Ranks = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    shares = [tokens / count for tokens, count in zip(load, replicas, strict=True)]
    for expert in sorted(range(len(load)), key=lambda expert: (-shares[expert], expert)):
        for _ in range(replicas[expert]):
            _add(placement, totals, rooms, expert, shares)
    return [sorted(own) for own in placement]


def _add(placement: Ranks, totals: list[float], rooms: Sequence[int], expert: int, shares: Sequence[float]) -> None:
    """Give a replica of an expert to the rank with the least to do that has room, and not this expert yet. Where there
    is none, to a full one, which gives one of its own to a rank with room."""
    ranks = range(len(placement))
    open_ranks = [rank for rank in ranks if len(placement[rank]) < rooms[rank]]
    target = min((rank for rank in open_ranks if expert not in placement[rank]), key=totals.__getitem__, default=None)
    if target is None:
        target = min((rank for rank in ranks if expert not in placement[rank]), key=totals.__getitem__)
        other = open_ranks[0]
        moved = next(each for each in reversed(placement[target]) if each not in placement[other])
        placement[target].remove(moved)
        placement[other].append(moved)
        totals[target] -= shares[moved]
        totals[other] += shares[moved]
    placement[target].append(expert)
    totals[target] += shares[expert]


def rank_loads(load: Sequence[int], placement: Ranks) -> list[float]:
    """Tokens that each rank computes, of which replicas of an expert have equal shares."""
    replicas = [sum(expert in own for own in placement) for expert in range(len(load))]
    return [sum(load[expert] / replicas[expert] for expert in own) for own in placement]


def balancedness(loads: Sequence[float]) -> float:
    """Mean over maximum: 1 where all have the same, and the lower, the longer others wait for one. 1 without load."""
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0


def places_of(placement: Ranks, num_experts: int) -> list[list[int]]:
    """Of each expert the places of its replicas among those of all ranks, one rank's behind the other's."""
    places: list[list[int]] = [[] for _ in range(num_experts)]
    for place, expert in enumerate(expert for own in placement for expert in own):
        places[expert].append(place)
    return places


def check_sizes(num_experts: int, ranks: int, redundant: int = 0) -> None:
    """Raises ``PenstockError`` (``invalid``) for more ranks than experts, or more replicas of each than ranks."""
    if num_experts < ranks:
        raise invalid("enable_expert_parallel", f"{ranks} ranks cannot share {num_experts} experts", num_experts)
    if redundant > (most := num_experts * (ranks - 1)):
        words = f"{ranks} ranks have room for {most} replicas more of {num_experts} experts, one a rank of each"
        raise invalid("num_redundant_experts", words, most)


def read_placement(path: str, num_experts: int, ranks: int, redundant: int = 0) -> ExpertPlacement:
    """Read a file of ``penstock plan experts``.

    Args:
        redundant: redundant experts that it should have; 0 is any number.

    Raises ``PenstockError`` (``invalid``) where there is none, or it does not fit model and ranks.
    """
    field = "expert_placement"
    found = _read(path, ExpertPlacement, field)
    if found.num_experts != num_experts:
        raise invalid(field, f"{path} is for {found.num_experts} experts, and the model has {num_experts}")
    for layer, placement in found.layers.items():
        where = f"{path}, layer {layer}:"
        if len(placement) != ranks:
            raise invalid(field, f"{where} is for {len(placement)} ranks, not {ranks}: plan it for these", ranks)
        if any(len(set(own)) < len(own) for own in placement) or not all(placement):
            raise invalid(field, f"{where} a rank has no experts, or one of them twice")
        if {expert for own in placement for expert in own} != set(range(num_experts)):
            raise invalid(field, f"{where} some of the {num_experts} experts have no rank, or there are others")
        more = sum(map(len, placement)) - num_experts
        if redundant not in (0, more):
            raise invalid("num_redundant_experts", f"{where} has {more}: give that number, or 0", more)
    return found


def num_redundant_experts(path: str, count: int) -> int:
    """Replicas in each layer: those asked for, or the most that a file's layers have. Raises ``PenstockError``
    (``invalid``) where there is no such file."""
    if count or not path:
        return count
    found = _read(path, ExpertPlacement, "expert_placement")
    return max((sum(map(len, placed)) - found.num_experts for placed in found.layers.values()), default=0)


def read_load(path: str) -> ExpertLoadReport:
    """Read a report of ``/expert_load``. Raises ``PenstockError`` (``invalid``) where it is none."""
    report = _read(path, ExpertLoadReport, "load")
    if not report.layers or any(len(load) != report.num_experts for load in report.layers.values()):
        raise invalid("load", f"{path} has no layers, or some with another number of experts")
    if any(count < 0 for load in report.layers.values() for count in load):
        raise invalid("load", f"{path} has negative numbers of tokens")
    return report


def _read(path: str, kind: type[T], field: str) -> T:
    try:
        return msgspec.json.decode(read_text_file(Path(path), field), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(field, f"{path} is no such file: {error}") from error


def plan(report: ExpertLoadReport, ranks: int, redundant: int = 0) -> ExpertPlacement:
    """The placement for a load. Raises ``PenstockError`` as ``place``."""
    layers: Mapping[int, list[int]] = report.layers
    planned = {layer: place(load, ranks, redundant) for layer, load in layers.items()}
    return ExpertPlacement(num_experts=report.num_experts, layers=planned)
