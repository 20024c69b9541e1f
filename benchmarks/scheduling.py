"""Time of a step without the model, and size of its message to a worker.

python benchmarks/scheduling.py

256 sequences decode, with and without waiting requests. No model runs: every sampled token is 7. Prints the median and
the minimum of each part of a step:

    schedule  the scheduler plans the step
    send      the message is built, encoded, decoded, and applied to the worker's batch: at most 100 µs and 4 KiB
    flatten   the worker builds the model's input batch
    update    the scheduler processes the output
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np

from penstock.config.options import SchedulerOptions
from penstock.core import EngineRequest, SamplingParams
from penstock.engine.kv.block_pool import BlockPool
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.step import SampledTokens, StepInput, StepOutput, decoder, encoder
from penstock.engine.worker.input_batch import InputBatch

BLOCK = 64
MAX_LEN = 2048


def request(name: int, tokens: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=1024, ignore_eos=True)
    return EngineRequest(request_id=str(name), prompt=[name % 1000 + 1] * tokens, sampling=sampling)


def measure(running: int, waiting: int, steps: int) -> tuple[dict[str, list[float]], int]:
    """Microseconds of each part of each step, and size of the largest message in bytes."""
    options = SchedulerOptions(max_num_seqs=running, max_waiting=waiting, max_num_batched_tokens=2048)
    scheduler = Scheduler(options, BlockPool(running * MAX_LEN // BLOCK, BLOCK))
    batch = InputBatch(running, MAX_LEN, BLOCK)
    decode = decoder(StepInput).decode
    for name in range(running + waiting):
        scheduler.add(request(name, 100))
    times: dict[str, list[float]] = {"schedule": [], "send": [], "flatten": [], "update": []}
    max_bytes = 0
    while len(times["update"]) < steps:
        at = [time.perf_counter()]
        plan = scheduler.schedule()
        at.append(time.perf_counter())
        message = encoder.encode(scheduler.builder.build(plan))
        step = decode(message)
        batch.apply(step.updates)
        at.append(time.perf_counter())
        batch.flatten(step.rows, step.starts, step.lengths.astype(np.int64), step.needs_sample.astype(np.int64))
        at.append(time.perf_counter())
        output = StepOutput([SampledTokens([7]) for item in plan.scheduled for _ in item.sampling_sequences])
        begun = time.perf_counter()
        scheduler.update(plan, output)
        at.append(at[-1] + time.perf_counter() - begun)
        if plan.tokens == running:  # in this step, all sequences decode
            max_bytes = max(max_bytes, len(message))
            for part, (a, b) in zip(times, itertools.pairwise(at), strict=True):
                times[part].append((b - a) * 1e6)
    return times, max_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="running sequences (default: 256)")
    parser.add_argument(
        "--waiting", type=int, nargs="+", default=[0, 10_000], help="waiting requests (default: 0 10000)"
    )
    parser.add_argument("--steps", type=int, default=300, help="number of steps (default: 300)")
    args = parser.parse_args()
    for waiting in args.waiting:
        times, max_bytes = measure(args.running, waiting, args.steps)
        parts = ", ".join(f"{part} {statistics.median(us):.0f} ({min(us):.0f})" for part, us in times.items())
        print(f"{args.running} running, {waiting:>6} waiting: {parts} µs per step; at most {max_bytes} bytes sent")


if __name__ == "__main__":
    main()
