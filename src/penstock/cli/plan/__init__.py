"""``penstock plan``: memory planning. Loads no torch."""

from __future__ import annotations

import argparse
from importlib import import_module

KINDS = {
    "memory": ("memory", "tell what weights and KV cache take, and what the cache is then good for"),
    "block-bs": ("block_bs", "compare PaddleNLP's recommended BLOCK_BS with the sums"),
    "experts": ("experts", "plan from their load which experts to replicate, and which rank has which"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (module, about) in KINDS.items():
        kind = kinds.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
        import_module(f"{__name__}.{module}").add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand; returns the exit status."""
    module, _ = KINDS[args.kind]
    return int(import_module(f"{__name__}.{module}").run(args))
