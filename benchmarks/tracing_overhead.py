"""What traces cost: servers with them off, on for a tenth of the requests, and on for all, all up, asked in turns.

python benchmarks/tracing_overhead.py [CHECKPOINT] [--against FOLDER]

A small model makes the server's own work count most. The collector is tests/support/collector.py, on the same machine,
and forgets what it gets; its work is in the figures of speed, but not in the servers' processor time. Each round asks
every server once, in an order that is drawn; a round's ratio is to the server with traces off. Quoted is the median of
the ratios, and the interval that holds it in 95 of 100 resamplings. The least processor time of all rounds is what a
busy machine disturbs least. ``--against`` adds a server of another tree of this project, as one from before traces
came: its ratio says what they cost where they are off.
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
from collector import collecting

RATIOS = {"off": None, "10 %": 0.1, "100 %": 1.0}
SERVE = "-m penstock.cli.main serve --model {model} --port {port} --log-level warning"
FIGURES = {
    "CPU, ms a request": "cpu",
    "tokens/s": "output_throughput",
    "TTFT p50, ms": "median_ttft_ms",
    "ITL p50, ms": "median_itl_ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="(default: the built-in model)")
    parser.add_argument("--against", type=Path, help="another tree of this project, with a .venv of its own")
    parser.add_argument("--max-concurrency", type=int, default=16, help="(default: 16)")
    parser.add_argument("--input-len", type=int, default=16, help="tokens a prompt has (default: 16)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate for each (default: 64)")
    parser.add_argument("--rounds", type=int, default=15, help="turns each server takes (default: 15)")
    args = parser.parse_args()
    if args.checkpoint is None:
        from penstock import demo

        args.checkpoint = demo.CHAT

    before = os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        collecting(Path(folder), discard=True) as collector,
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
                if turn >= 0:  # the first one warms up
                    found[name].append(figures)
    print(
        f"load before: {before:.1f} on {os.cpu_count()} cores; {args.max_concurrency} streams, {args.rounds} rounds\n"
    )
    print(table(found))


def cpu_seconds(url: str) -> float:
    """Processor time of a server's processes so far, of which the first has its port in the command line."""
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
    """Medians, and medians of the ratios to the server with traces off, as Markdown."""
    titles = " | ".join(f"{title} | ratio" for title in FIGURES)
    lines = [f"| traces | least CPU, ms a request | ratio | {titles} |", "|---" * (3 + 2 * len(FIGURES)) + "|"]
    least = {name: min(run["cpu"] for run in runs) for name, runs in found.items()}
    for name, runs in found.items():
        cells = [f"{least[name]:.2f}", f"{least[name] / least['off']:.3f}"]
        for key in FIGURES.values():
            median = statistics.median(run[key] for run in runs)
            ratios = [run[key] / off[key] for run, off in zip(runs, found["off"], strict=True)]
            low, high = interval(ratios)
            cells += [f"{median:,.2f}", f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: list[float], resamplings: int = 2000) -> tuple[float, float]:
    """The interval that holds the median in 95 of 100 resamplings."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamplings))
    return medians[resamplings // 40], medians[-resamplings // 40]


if __name__ == "__main__":
    main()
