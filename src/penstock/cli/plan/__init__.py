"""``penstock plan``: memory and expert planning. Imports no torch."""

from __future__ import annotations

import argparse
from importlib import import_module

from ..parser import add_kinds

KINDS = {
    "memory": ("memory", "compute the memory of weights and KV cache, and recommend settings"),
    "block-bs": ("block_bs", "compare PaddleNLP's recommended BLOCK_BS with computed values"),
    "experts": ("experts", "plan the replication and placement of experts from their load"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, __name__, KINDS)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand; returns the exit status."""
    module, _ = KINDS[args.kind]
    return int(import_module(f"{__name__}.{module}").run(args))
