"""Overhead of serving: streaming clients of a tiny model, on Penstock's server and a peer's server, alternating.

python benchmarks/serving_overhead.py CHECKPOINT --peer "python -m vllm.entrypoints.openai.api_server --port {port} ..."

In the peer's command, {model} and {port} are replaced. The client is ``penstock bench serve`` on the same machine, so
its processor time affects both servers. The ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

OURS = f"{sys.executable} -m penstock.cli.main serve --model {{model}} --port {{port}} --log-level warning"
START_LIMIT = 300.0
"""Time limit of a server's start in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--peer", help="command of an OpenAI-compatible server to compare with")
    parser.add_argument(
        "--max-concurrency", type=int, nargs="+", default=[1, 16, 64], help="concurrent requests (default: 1 16 64)"
    )
    parser.add_argument("--input-len", type=int, default=16, help="tokens per prompt (default: 16)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate per prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument("--json", type=Path, help="write results to this file")
    args = parser.parse_args()

    commands = {"penstock": OURS} | ({"peer": args.peer} if args.peer else {})
    found: dict[str, dict[int, list[dict[str, Any]]]] = {
        name: {c: [] for c in args.max_concurrency} for name in commands
    }
    for turn in tqdm(range(args.rounds), desc="rounds", unit="round"):
        for name, command in commands.items():
            with serving(command, args.checkpoint) as url:
                for concurrency in args.max_concurrency:
                    found[name][concurrency].append(measure(url, concurrency, args, seed=turn))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found, args.max_concurrency))


@contextmanager
def serving(command: str, checkpoint: Path) -> Iterator[str]:
    """Context with the URL of a started server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(shlex.split(command.format(model=checkpoint, port=port)), stdout=subprocess.DEVNULL)
    try:
        url, limit = f"http://127.0.0.1:{port}", time.monotonic() + START_LIMIT
        while not healthy(url):
            if server.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"the server exited, or was not healthy within {START_LIMIT:.0f} s: {command}")
            time.sleep(0.1)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def measure(url: str, concurrency: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Results of ``penstock bench serve`` with ``concurrency`` concurrent requests."""
    options = {
        "base-url": url,
        "max-concurrency": concurrency,
        "num-prompts": max(8 * concurrency, 32),
        "random-input-len": args.input_len,
        "random-output-len": args.output_len,
        "seed": seed,
        "num-warmups": 8,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "serve", "--ignore-eos", "--json", "-", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def table(found: dict[str, dict[int, list[dict[str, Any]]]], levels: list[int]) -> str:
    """Markdown table of medians over the rounds, and, with a peer, medians of the rounds' ratios."""
    lines = ["| streams | server | tokens/s | TTFT p50, ms | ITL p50, ms |", "|---:|---|---:|---:|---:|"]
    names = {"tokens": "output_throughput", "ttft": "median_ttft_ms", "itl": "median_itl_ms"}
    for level in levels:
        for server, runs in found.items():
            tokens, ttft, itl = (statistics.median(run[key] for run in runs[level]) for key in names.values())
            lines.append(f"| {level} | {server} | {tokens:,.0f} | {ttft:.1f} | {itl:.2f} |")
        if "peer" in found:
            pairs = list(zip(found["penstock"][level], found["peer"][level], strict=True))
            tokens, ttft, itl = (statistics.median(a[key] / b[key] for a, b in pairs) for key in names.values())
            lines.append(f"| {level} | ratio | {tokens:.2f} | {ttft:.2f} | {itl:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
