"""Placement of experts on expert-parallel ranks: contiguous, or planned from the experts' load.

The plan is that of DeepSeek's EPLB (DeepSeek-AI, 2025) for one group of ranks: the experts with the most tokens per
replica get another replica; then replicas are assigned to the least loaded ranks, the heaviest first. Terms are used
as in vLLM's expert parallel load balancing: a redundant expert is an additional replica; balancedness is the mean
load over the maximum.
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
"""Expert ids of each rank."""


class ExpertPlacement(msgspec.Struct, kw_only=True):
    """Placement of a model's experts, by layer."""

    num_experts: int
    layers: dict[int, Ranks]
    """Placement by layer; layers without an entry use ``even_placement``."""


class ExpertLoadReport(msgspec.Struct, kw_only=True):
    """Report of ``/expert_load``: number of tokens routed to each expert."""

    num_experts: int
    layers: dict[int, list[int]]
    """Token counts ``[experts]`` by layer."""
    model: str = ""
    """Name of the served model."""


def contiguous_placement(num_experts: int, ranks: int) -> Ranks:
    """Placement with a contiguous range of experts on each rank, without replicas."""
    ends = [num_experts * rank // ranks for rank in range(ranks + 1)]
    return [list(range(*pair)) for pair in pairwise(ends)]


def even_placement(num_experts: int, ranks: int, redundant: int = 0) -> Ranks:
    """Placement without a load report: contiguous, or if there are redundant experts, planned for equal loads."""
    return place([1] * num_experts, ranks, redundant) if redundant else contiguous_placement(num_experts, ranks)


def place(load: Sequence[int], ranks: int, redundant: int = 0) -> Ranks:
    """Plan the placement of a layer's experts.

    Args:
        load: number of tokens of each expert.
        redundant: total number of replicas in addition to one per expert.

    Raises ``PenstockError`` (``invalid``) for too many ranks or replicas (``check_sizes``).
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
    """Assign a replica to the least loaded rank that has room and does not have the expert yet. If all ranks with room
    have the expert, assign the replica to a full rank, after moving one of that rank's experts to a rank with room."""
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
    """Number of tokens computed by each rank; the replicas of an expert share its tokens equally."""
    replicas = [sum(expert in own for own in placement) for expert in range(len(load))]
    return [sum(load[expert] / replicas[expert] for expert in own) for own in placement]


def balancedness(loads: Sequence[float]) -> float:
    """Mean load of the ranks divided by their maximum: 1 if all loads are equal (or 0), lower if one rank has more."""
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0


def places_of(placement: Ranks, num_experts: int) -> list[list[int]]:
    """For each expert, the indices of its replicas in the concatenation of all ranks' experts."""
    places: list[list[int]] = [[] for _ in range(num_experts)]
    for place, expert in enumerate(expert for own in placement for expert in own):
        places[expert].append(place)
    return places


def check_sizes(num_experts: int, ranks: int, redundant: int = 0) -> None:
    """Raise ``PenstockError`` (``invalid``) if there are more ranks than experts, or more replicas than one per expert
    and rank."""
    if num_experts < ranks:
        message = f"{ranks} ranks cannot share {num_experts} experts: use at most {num_experts} ranks"
        raise invalid("enable_expert_parallel", message, num_experts)
    if redundant > (most := num_experts * (ranks - 1)):
        message = f"must be at most {most}, is {redundant}: each of {ranks} ranks holds an expert at most once"
        raise invalid("num_redundant_experts", message, most)


def read_placement(path: str, num_experts: int, ranks: int, redundant: int = 0) -> ExpertPlacement:
    """Read a placement file written by ``penstock plan experts``.

    Args:
        redundant: required number of redundant experts in each layer; 0: any number.

    Raises ``PenstockError`` (``invalid``) if the file cannot be read, or does not match the model and the ranks.
    """
    field = "expert_placement"
    found = _read(path, ExpertPlacement, field)
    if found.num_experts != num_experts:
        message = f"{path} is for {found.num_experts} experts, but the model has {num_experts}"
        raise invalid(field, f"{message}: run penstock plan experts for this model")
    for layer, placement in found.layers.items():
        where = f"{path}, layer {layer}:"
        if len(placement) != ranks:
            message = f"{where} is for {len(placement)} ranks, not {ranks}: run penstock plan experts for {ranks} ranks"
            raise invalid(field, message, ranks)
        for rank, experts in enumerate(placement):
            if not experts or len(set(experts)) < len(experts):
                raise invalid(field, f"{where} rank {rank} must have at least one expert, each once, has {experts}")
        if unexpected := {expert for experts in placement for expert in experts} ^ set(range(num_experts)):
            raise invalid(
                field,
                f"{where} must place the experts 0 to {num_experts - 1}; missing or unknown: {sorted(unexpected)}",
            )
        more = sum(map(len, placement)) - num_experts
        if redundant not in (0, more):
            message = f"is {redundant}, but {where} has {more} redundant experts: set {more} or 0"
            raise invalid("num_redundant_experts", message, more)
    return found


def num_redundant_experts(path: str, count: int) -> int:
    """Number of redundant experts per layer: ``count``, or if it is 0, the maximum over the layers of a placement file.

    Raises ``PenstockError`` (``invalid``) if the file cannot be read.
    """
    if count or not path:
        return count
    found = _read(path, ExpertPlacement, "expert_placement")
    return max((sum(map(len, placed)) - found.num_experts for placed in found.layers.values()), default=0)


def read_load(path: str) -> ExpertLoadReport:
    """Read a report saved from ``/expert_load``. Raises ``PenstockError`` (``invalid``) for any other file."""
    report = _read(path, ExpertLoadReport, "load")
    if not report.layers:
        raise invalid("load", f"{path} has no layers: save it from /expert_load again")
    for layer, load in report.layers.items():
        if len(load) != report.num_experts:
            raise invalid("load", f"{path}, layer {layer}: has {len(load)} experts, not {report.num_experts}")
        if (lowest := min(load, default=0)) < 0:
            raise invalid("load", f"{path}, layer {layer}: has the token count {lowest}; counts are at least 0")
    return report


def _read(path: str, kind: type[T], field: str) -> T:
    try:
        return msgspec.json.decode(read_text_file(Path(path), field), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        advice = "save the response of GET /expert_load" if field == "load" else "write it with penstock plan experts"
        raise invalid(field, f"{path} cannot be parsed: {error}; {advice}") from error


def plan(report: ExpertLoadReport, ranks: int, redundant: int = 0) -> ExpertPlacement:
    """Plan the placement of all layers of a load report. Raises the errors of ``place``."""
    layers: Mapping[int, list[int]] = report.layers
    planned = {layer: place(load, ranks, redundant) for layer, load in layers.items()}
    return ExpertPlacement(num_experts=report.num_experts, layers=planned)
