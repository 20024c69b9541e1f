"""Overhead of tracing: three servers that trace 0 %, 10 % and 100 % of the requests run at the same time, and are
measured alternately.

python benchmarks/tracing_overhead.py [CHECKPOINT] [--against FOLDER]

With a small model, most time is the server's work. The collector (tests/support/collector.py) runs on this machine and
discards its data; it affects speed, but not the servers' processor time. Each round measures every server once, in
random order; ratios are relative to the server without tracing in the same round. The results are the median of the
ratios with its 95 % bootstrap interval. The minimum of processor time over all rounds is least affected by other load.
``--against`` adds a server from another tree of this project, such as one without tracing code, to measure the cost of
disabled tracing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from serving_overhead import measure, serving
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from collector import run_collector

RATIOS = {"off": None, "10 %": 0.1, "100 %": 1.0}
SERVE = "-m penstock.cli.main serve --model {model} --port {port} --log-level warning"
FIGURES = {
    "CPU, ms/request": "cpu",
    "tokens/s": "output_throughput",
    "TTFT p50, ms": "median_ttft_ms",
    "ITL p50, ms": "median_itl_ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="(default: the built-in model)")
    parser.add_argument("--against", type=Path, help="another tree of this project, with a .venv")
    parser.add_argument("--max-concurrency", type=int, default=16, help="concurrent requests (default: 16)")
    parser.add_argument("--input-len", type=int, default=16, help="tokens per prompt (default: 16)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate per prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (default: 15)")
    args = parser.parse_args()
    if args.checkpoint is None:
        from penstock import demo

        args.checkpoint = demo.CHAT

    before = os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        run_collector(Path(folder), discard=True) as collector,
        ExitStack() as stack,
    ):
        commands = {}
        for name, ratio in RATIOS.items():
            flags = "" if ratio is None else f" --otlp-endpoint {collector.grpc} --trace-sampling-ratio {ratio}"
            commands[name] = f"{sys.executable} {SERVE}{flags}"
        if args.against:
            commands["other tree, off"] = f"{args.against / '.venv/bin/python'} {SERVE}"
        urls = {name: stack.enter_context(serving(command, args.checkpoint)) for name, command in commands.items()}
        found = {name: [] for name in urls}
        for turn in tqdm(range(-1, args.rounds), desc="rounds", unit="round"):
            for name in random.sample(list(urls), len(urls)):
                begun = cpu_seconds(urls[name])
                figures = measure(urls[name], args.max_concurrency, args, seed=turn + 1)
                figures["cpu"] = 1e3 * (cpu_seconds(urls[name]) - begun) / figures["completed"]
                if turn >= 0:  # round -1 is a warm-up
                    found[name].append(figures)
    print(
        f"load before: {before:.1f} on {os.cpu_count()} cores; {args.max_concurrency} streams, {args.rounds} rounds\n"
    )
    print(table(found))


def cpu_seconds(url: str) -> float:
    """Processor time in seconds of a server's process, found by the port in its command line, and its descendants."""
    port, parents, times, first = url.rpartition(":")[2], {}, {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[folder.name], times[folder.name] = fields[1], int(fields[11]) + int(fields[12])
            if f"--port\0{port}\0" in (folder / "cmdline").read_text() and "serve" in (folder / "cmdline").read_text():
                first.add(folder.name)
    found = set(first)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(times[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown table of medians, and of medians of the ratios to the server without tracing."""
    titles = " | ".join(f"{title} | ratio" for title in FIGURES)
    lines = [f"| traces | minimum CPU, ms/request | ratio | {titles} |", "|---" * (3 + 2 * len(FIGURES)) + "|"]
    minimum = {name: min(run["cpu"] for run in runs) for name, runs in found.items()}
    for name, runs in found.items():
        cells = [f"{minimum[name]:.2f}", f"{minimum[name] / minimum['off']:.3f}"]
        for key in FIGURES.values():
            median = statistics.median(run[key] for run in runs)
            ratios = [run[key] / off[key] for run, off in zip(runs, found["off"], strict=True)]
            low, high = interval(ratios)
            cells += [f"{median:,.2f}", f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: list[float], resamplings: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamplings))
    return medians[resamplings // 40], medians[-resamplings // 40]


if __name__ == "__main__":
    main()
