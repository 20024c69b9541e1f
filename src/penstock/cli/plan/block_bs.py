"""``penstock plan block-bs``: compare PaddleNLP's recommended ``BLOCK_BS`` with computed values."""

from __future__ import annotations

import argparse

from penstock.cli.screen import print_json
from penstock.planning.paddlenlp_table import GPUS, LENGTH, RESERVE, ROWS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    rows = [
        {
            "model": row.name,
            "gpus": row.nodes * GPUS,
            "weight_bytes": round(row.weights),
            "sequence_bytes": row.sequence,
            "recommended": row.recommended,
            "summed": row.computed,
        }
        for row in ROWS
    ]
    if args.json:
        print_json(rows)
        return 0
    print(f"{'model':<40} {'GPUs':>4} {'weights':>9} {'sequence':>9} {'PaddleNLP':>9} {'computed':>8}")
    for row in ROWS:
        numbers = f"{row.weights / 1e9:>6.1f} GB {row.sequence / 1e9:>6.3f} GB {row.recommended:>9} {row.computed:>8}"
        difference = "" if row.computed == row.recommended else f"  {row.recommended - row.computed:+d}"
        print(f"{row.name:<40} {row.nodes * GPUS:>4} {numbers}{difference}")
    print(f"Per GPU with 80 GiB; a sequence has {LENGTH} tokens; {RESERVE / 1e9:g} GB stay free, fitted to the first")
    print("row. Rows with a difference (last column) are not explained by the computation.")
    return 0
