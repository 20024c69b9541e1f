"""``penstock plan``: memory planning. Loads no torch."""

from __future__ import annotations

import argparse
from importlib import import_module

from ..parser import add_kinds

KINDS = {
    "memory": ("memory", "tell what weights and KV cache take, and what the cache is then good for"),
    "block-bs": ("block_bs", "compare PaddleNLP's recommended BLOCK_BS with the sums"),
    "experts": ("experts", "plan from their load which experts to replicate, and which rank has which"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, __name__, KINDS)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand; returns the exit status."""
    module, _ = KINDS[args.kind]
    return int(import_module(f"{__name__}.{module}").run(args))
