"""Microseconds that a step costs besides the model, and bytes that it sends to a worker.

python benchmarks/scheduling.py

256 sequences decode; the rows differ in how many requests wait behind them. No model runs: every sample is token 7.
"send" is what the seam between scheduler and worker costs on both sides together: making the message, encoding and
decoding it, and bringing the worker's rows up to date. "flatten" makes the batch that the model computes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np
import torch

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest, SamplingParams
from penstock.engine.kv.block_pool import BlockPool
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.step import Draw, StepInput, StepOutput, decoder, encoder
from penstock.engine.worker.input_batch import InputBatch

BLOCK = 64
LONGEST = 2048


def request(name: int, tokens: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=1024, ignore_eos=True)
    return EngineRequest(request_id=str(name), prompt=[name % 1000 + 1] * tokens, sampling=sampling)


def measure(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part of a step, and its message's most bytes."""
    options = SchedulerOptions(max_num_seqs=running, max_waiting=waiting, max_num_batched_tokens=2048)
    scheduler = Scheduler(options, BlockPool(running * LONGEST // BLOCK, BLOCK))
    batch = InputBatch(running, LONGEST, BLOCK, torch.device("cpu"))
    decode = decoder(StepInput).decode
    for name in range(running + waiting):
        scheduler.add(request(name, 100))
    taken: dict[str, list[float]] = {"schedule": [], "send": [], "flatten": [], "update": []}
    most = 0
    while len(taken["update"]) < steps:
        at = [time.perf_counter()]
        plan = scheduler.schedule()
        at.append(time.perf_counter())
        message = encoder.encode(scheduler.builder.step(plan, scheduler.builder.updates(plan)))
        step = decode(message)
        batch.apply(step.updates)
        at.append(time.perf_counter())
        batch.flatten(step.rows, step.starts, step.lengths.astype(np.int64), step.samples.astype(np.int64))
        at.append(time.perf_counter())
        output = StepOutput([Draw([7]) for item in plan.items for _ in item.samples])
        begun = time.perf_counter()
        scheduler.update(plan, output)
        at.append(at[-1] + time.perf_counter() - begun)
        if plan.tokens == running:  # all decode
            most = max(most, len(message))
            for part, (a, b) in zip(taken, itertools.pairwise(at), strict=True):
                taken[part].append((b - a) * 1e6)
    return {part: statistics.median(values) for part, values in taken.items()} | {"bytes": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="sequences (default: 256)")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000], help="requests (default: 0 10000)")
    parser.add_argument("--steps", type=int, default=300, help="to take the median of (default: 300)")
    args = parser.parse_args()
    for waiting in args.waiting:
        parts = measure(args.running, waiting, args.steps)
        most = parts.pop("bytes")
        told = ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
        print(f"{args.running} running, {waiting:>6} waiting: {told} µs a step; at most {most:.0f} bytes sent")


if __name__ == "__main__":
    main()
