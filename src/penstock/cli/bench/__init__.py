"""``penstock bench``: latency and throughput of an engine, load tests of a server, and start times."""

from __future__ import annotations

import argparse
from importlib import import_module

from ..parser import add_kinds

KINDS = {
    "latency": ("offline", "measure the latency of one batch of random prompts (engine without server)"),
    "throughput": ("offline", "measure the throughput for a queue of prompts (engine without server)"),
    "serve": ("serve", "load-test any OpenAI-compatible server and measure latencies and throughput of its clients"),
    "startup": ("startup", "measure the time from starting a server to its first token"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, __name__, KINDS)


def run(args: argparse.Namespace) -> int:
    """Run a benchmark; returns the exit status."""
    module, _ = KINDS[args.kind]
    return int(import_module(f"{__name__}.{module}").run(args))
