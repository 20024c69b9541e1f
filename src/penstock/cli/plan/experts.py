"""``penstock plan experts``: plan the replication and placement of experts from the tokens routed to them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.screen import print_json
from penstock.core.errors import invalid
from penstock.core.expert_placement import (
    ExpertLoadReport,
    ExpertPlacement,
    balancedness,
    contiguous_placement,
    plan,
    rank_loads,
    read_load,
)

BAR = 24
"""Width of the longest bar in characters."""
EIGHTHS = " ▏▎▍▌▋▊▉"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("load", metavar="LOAD", help="file with the response of GET /expert_load")
    about = "number of expert-parallel ranks"
    parser.add_argument("--expert-parallel-size", type=int, required=True, metavar="RANKS", help=about)
    about = "number of additional expert replicas in each layer (default: 0)"
    parser.add_argument("--num-redundant-experts", type=int, default=0, metavar="N", help=about)
    parser.add_argument("--output", metavar="FILE", help="write the placement to a file for --expert-placement")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    ranks, redundant = args.expert_parallel_size, args.num_redundant_experts
    if ranks < 1:
        raise invalid("expert_parallel_size", f"must be at least 1, is {ranks}", 1)
    if redundant < 0:
        raise invalid("num_redundant_experts", f"must be at least 0, is {redundant}", 0)
    report = read_load(args.load)
    placement = plan(report, ranks, redundant)
    if args.output:
        _write(Path(args.output), placement)
    rows = [_row(report, placement, layer, ranks) for layer in report.layers]
    if args.json:
        print_json(rows)
        return 0
    _print_table(rows, ranks, redundant)
    worst = min(rows, key=lambda row: row["balance_before"])
    _print_bars(worst)
    if args.output:
        print(f"\nWritten to {args.output}; to use it, run")
        options = f"--enable-expert-parallel --tensor-parallel-size {ranks} --expert-placement {args.output}"
        print(f"  penstock serve --model MODEL {options}")
    return 0


def _write(path: Path, placement: ExpertPlacement) -> None:
    try:
        path.write_bytes(msgspec.json.encode(placement) + b"\n")
    except OSError as error:
        raise invalid("output", f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error


def _row(report: ExpertLoadReport, placement: ExpertPlacement, layer: int, ranks: int) -> dict[str, Any]:
    """Results for a layer, by name."""
    load, placed = report.layers[layer], placement.layers[layer]
    before, after = rank_loads(load, contiguous_placement(len(load), ranks)), rank_loads(load, placed)
    busiest = max(range(len(load)), key=load.__getitem__)
    replicas = [sum(expert in own for own in placed) for expert in range(len(load))]
    return {
        "layer": layer,
        "tokens": sum(load),
        "busiest_expert": busiest,
        "busiest_expert_of_mean": round(load[busiest] * len(load) / max(sum(load), 1), 2),
        "balance_before": round(balancedness(before), 4),
        "balance_after": round(balancedness(after), 4),
        "replicas": {str(expert): count for expert, count in enumerate(replicas) if count > 1},
        "ranks_before": [round(own) for own in before],
        "ranks_after": [round(own) for own in after],
    }


def _print_table(rows: list[dict[str, Any]], ranks: int, redundant: int) -> None:
    replicas = f", with {redundant} redundant experts per layer" if redundant else ""
    print(f"Balance of {ranks} ranks (mean over maximum of their tokens){replicas}")
    print(f"{'layer':>5} {'tokens':>12} {'busiest expert':>20} {'contiguous':>11} {'planned':>8}  replicated")
    for row in rows:
        busiest = f"{row['busiest_expert']} ({row['busiest_expert_of_mean']:.1f} x mean)"
        numbers = f"{row['balance_before']:>11.2f} {row['balance_after']:>8.2f}"
        print(f"{row['layer']:>5} {row['tokens']:>12,} {busiest:>20} {numbers}  {_replicated(row)}".rstrip())
    means = [sum(row[name] for row in rows) / len(rows) for name in ("balance_before", "balance_after")]
    print(f"{'mean':>5} {'':>12} {'':>20} {means[0]:>11.2f} {means[1]:>8.2f}")


def _replicated(row: dict[str, Any], most: int = 8) -> str:
    """Replicated experts, in descending order of replicas."""
    replicas = sorted(row["replicas"].items(), key=lambda item: -item[1])
    named = [f"{expert} x {count}" for expert, count in replicas[:most]]
    return ", ".join(named) + (f" and {len(replicas) - most} more" if replicas[most:] else "")


def _print_bars(row: dict[str, Any]) -> None:
    before, after = row["ranks_before"], row["ranks_after"]
    most = max(*before, *after, 1)
    print(f"\nLayer {row['layer']}, the least balanced one: tokens of each rank")
    print(f"{'rank':>5}  {'contiguous':<{BAR + 12}}  planned")
    for rank, pair in enumerate(zip(before, after, strict=True)):
        left, right = (f"{_bar(count / most)} {count:>11,}" for count in pair)
        print(f"{rank:>5}  {left}  {right}")


def _bar(share: float) -> str:
    """A bar, padded with spaces to ``BAR`` characters."""
    eighths = round(share * BAR * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(BAR)
