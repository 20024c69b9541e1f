"""Overhead of ranks: a model on one rank with all threads, and on several ranks that share the same threads,
alternating.

python benchmarks/parallel.py CHECKPOINT --ranks 2x1 1x2

The work is the same, so the difference is the synchronization between ranks. First, a barrier between two processes is
timed. The results are medians over all rounds of the time per decode step and of a prefill, and the time on one rank
divided by the time on several ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from contextlib import closing
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from tqdm import tqdm

from penstock.config.options import EngineOptions
from penstock.core import EngineRequest, SamplingParams
from penstock.engine.engine import Engine
from penstock.ops import _kernels
from penstock.ops.cores import cores_of_rank, usable_cores
from penstock.parallel.shared_memory import SharedMemoryGroup, create_memory

BARRIERS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--ranks",
        type=grid,
        nargs="+",
        default=[(2, 1), (1, 2)],
        metavar="TPxPP",
        help="tensor-parallel ranks and pipeline stages (default: 2x1 1x2)",
    )
    parser.add_argument("--quantization", nargs="+", default=["none", "w8a8"], help="formats (default: none w8a8)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (default: 1 8 32)")
    parser.add_argument("--output-len", type=int, default=48, help="tokens per sequence (default: 48)")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a long prompt (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument(
        "--load-format", default="auto", help="format of the weights; dummy needs no weights (default: auto)"
    )
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    args = parser.parse_args()

    cores, grids = usable_cores(), [(1, 1), *args.ranks]
    print(f"barrier of two processes: {1e6 * barrier_seconds():.2f} microseconds")
    seconds: dict[tuple[str, str, Grid], list[float]] = defaultdict(list)
    turns = [(q, ranks) for _ in range(args.rounds) for q in args.quantization for ranks in grids]
    for quantization, ranks in tqdm(turns, desc="engines", unit="engine"):
        for work, times in measure(args, quantization, ranks, max(1, cores // prod(ranks))).items():
            seconds[quantization, work, ranks] += times
    rows = [
        {"quantization": q, "work": work} | {name(g): statistics.median(seconds[q, work, g]) for g in grids}
        for q, work in dict.fromkeys((q, work) for q, work, _ in seconds)
    ]
    print(f"| ms, with {cores} threads in total | {' | '.join(name(g) for g in grids)} |")
    print(f"|---|{'---:|' * len(grids)}")
    for row in rows:
        one, *others = (1e3 * row[name(g)] for g in grids)
        cells = [f"{one:.2f}", *(f"{several:.2f} ({one / several:.2f})" for several in others)]
        print(f"| {row['quantization']}, {row['work']} | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


Grid = tuple[int, int]
"""Numbers of tensor-parallel ranks and pipeline stages."""


def grid(text: str) -> Grid:
    ranks, stages = text.split("x")
    return int(ranks), int(stages)


def name(grid: Grid) -> str:
    return "tp {} pp {}".format(*grid)


def measure(args: argparse.Namespace, quantization: str, ranks: Grid, threads: int) -> dict[str, list[float]]:
    """Seconds of each decode step by batch size, and of each prefill."""
    options = EngineOptions(
        model=str(args.checkpoint),
        load_format=args.load_format,
        quantization=quantization,
        tensor_parallel_size=ranks[0],
        pipeline_parallel_size=ranks[1],
        threads=threads,
        distributed_executor_backend="mp",  # also for one rank, so that only the number of ranks differs
        max_model_len=args.prefill + args.output_len + 16,
        max_num_batched_tokens=args.prefill,
        num_gpu_blocks_override=64 + 4 * max(args.batch),
        enable_prefix_caching=False,
        weight_cache_dir="none",
    )
    with closing(Engine(options)) as engine:
        steps = {f"decode {batch}": decode(engine, batch, args.output_len) for batch in args.batch}
        return steps | {f"prefill {args.prefill}": [prefill(engine, args.prefill) for _ in range(5)][1:]}


def decode(engine: Engine, batch: int, length: int) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    for i in range(batch):
        engine.add(EngineRequest(request_id=str(i), prompt=[5 + i + j for j in range(16)], sampling=params))
    tokens, marks = 0, list[float]()
    while engine.busy:
        tokens += sum(len(delta.token_ids) for delta in engine.step())
        if tokens >= batch * (len(marks) + 1):
            marks.append(time.perf_counter())
    return [end - begun for begun, end in pairwise(marks)][1:]


def prefill(engine: Engine, tokens: int) -> float:
    params: Any = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add(EngineRequest(request_id="long", prompt=[5 + j % 200 for j in range(tokens)], sampling=params))
    begun = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - begun


def barrier_seconds() -> float:
    memory = create_memory()

    def wait(rank: int) -> float:
        if cores := cores_of_rank("auto", rank, 2):
            os.sched_setaffinity(0, cores)
        group = SharedMemoryGroup(memory, rank, 2)
        with group.step():
            _kernels.barrier(group.native)
            begun = time.perf_counter()
            for _ in range(BARRIERS):
                _kernels.barrier(group.native)
            return (time.perf_counter() - begun) / BARRIERS

    usable = os.sched_getaffinity(0)
    child = os.fork()
    if not child:
        try:
            wait(1)
        finally:
            os._exit(0)
    found = wait(0)
    os.waitpid(child, 0)
    os.sched_setaffinity(0, usable)
    return found


if __name__ == "__main__":
    main()
