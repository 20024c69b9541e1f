"""Microseconds that a step costs besides the model: scheduling, laying the batch out, taking the outcome in.

python benchmarks/scheduling.py

256 sequences decode; the columns differ in how many requests wait behind them. No model runs: every draw is token 7.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest, SamplingParams
from penstock.engine.kv.block_pool import BlockPool
from penstock.engine.scheduling.plan import Draw, Outcome
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.worker.input_batch import Flattener

BLOCK = 64
LONGEST = 2048


def request(name: int, tokens: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=1024, ignore_eos=True)
    return EngineRequest(request_id=str(name), prompt=[name % 1000 + 1] * tokens, sampling=sampling)


def measure(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part of a step."""
    options = SchedulerOptions(max_num_seqs=running, max_waiting=waiting, max_num_batched_tokens=2048)
    scheduler = Scheduler(options, BlockPool(running * LONGEST // BLOCK, BLOCK))
    flatten = Flattener(running, LONGEST, BLOCK, torch.device("cpu"))
    for name in range(running + waiting):
        scheduler.add(request(name, 100))
    taken: dict[str, list[float]] = {"schedule": [], "flatten": [], "update": []}
    while len(taken["update"]) < steps:
        at = [time.perf_counter()]
        plan = scheduler.schedule()
        at.append(time.perf_counter())
        flatten(plan)
        at.append(time.perf_counter())
        draws = [Draw([7], None) for item in plan.items for _ in item.samples]
        begun = time.perf_counter()
        scheduler.update(plan, Outcome(draws))
        at.append(at[-1] + time.perf_counter() - begun)
        if plan.tokens == running:  # all decode
            for part, (a, b) in zip(taken, itertools.pairwise(at), strict=True):
                taken[part].append((b - a) * 1e6)
    return {part: statistics.median(values) for part, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="sequences (default: 256)")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000], help="requests (default: 0 10000)")
    parser.add_argument("--steps", type=int, default=300, help="to take the median of (default: 300)")
    args = parser.parse_args()
    for waiting in args.waiting:
        parts = measure(args.running, waiting, args.steps)
        told = ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
        both = parts["schedule"] + parts["flatten"]
        print(f"{args.running} running, {waiting:>6} waiting: {told}; schedule and flatten {both:.0f} µs a step")


if __name__ == "__main__":
    main()
