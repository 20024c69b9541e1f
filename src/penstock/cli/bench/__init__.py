"""``penstock bench``: latency and throughput of the engine alone, a server under load, and how fast one starts."""

from __future__ import annotations

import argparse
from importlib import import_module

from ..parser import add_kinds

KINDS = {
    "latency": ("offline", "measure how long one batch of random prompts takes, with nothing else on the way"),
    "throughput": ("offline", "measure tokens a second when all random prompts are there at once"),
    "serve": ("serve", "put load on any OpenAI-compatible server and measure what its clients see"),
    "startup": ("startup", "measure how long a server takes from its command to the first token"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, __name__, KINDS)


def run(args: argparse.Namespace) -> int:
    """Run a benchmark; returns the exit status."""
    module, _ = KINDS[args.kind]
    return int(import_module(f"{__name__}.{module}").run(args))
