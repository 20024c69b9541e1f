"""``penstock bench serve``: load test of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .serve_flags import add_arguments

if TYPE_CHECKING:
    from .client import Client
    from .sample import Sample
    from .workload import Request

__all__ = ["add_arguments", "run"]

STANDARD_OUTPUT = Path("-")


def run(args: argparse.Namespace) -> int:
    """Run the load test and print the results; the exit status is 1 if no request succeeded."""
    _need("aiohttp")
    if args.picture:
        _need("matplotlib")
    from . import report

    requests = _requests(args)
    model, samples, busy = asyncio.run(_load(args, requests))
    if not any(sample.outcome == "ok" for sample in samples):
        print(f"penstock bench: none of {len(samples):,} requests succeeded: {samples[0].reason}", file=sys.stderr)
        return 1
    goodput = dict(args.goodput)
    measured = report.compute_results(samples, args.metric_percentiles, args.percentile_metrics, goodput)
    results = _conditions(args, model, requests) | measured | {"client_cpu": busy}
    if args.json != STANDARD_OUTPUT:
        print(report.table(results, args.metric_percentiles, args.percentile_metrics))
    if args.json:
        text = json.dumps(results, indent=1) + "\n"
        print(text, end="") if args.json == STANDARD_OUTPUT else args.json.write_text(text)
    if args.picture:
        from .plot import draw

        rates = f"{results['request_throughput']:,.3g} requests/s, {results['output_throughput']:,.4g} output tokens/s"
        draw(samples, goodput, f"{model}: {results['completed']:,} requests, {rates}", args.picture)
    return 0


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise PenstockError(
            Code.UNSUPPORTED, f"bench serve needs {package}, which is not installed: pip install 'penstock-llm[bench]'"
        )


def _requests(args: argparse.Namespace) -> list[Request]:
    """The requests in the order they arrive, each with its time."""
    from . import workload

    if _dataset(args) == "random":
        requests = workload.random_requests(
            args.num_prompts,
            args.random_input_len,
            args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=args.seed,
        )
    else:
        requests = workload.read_trace(
            args.dataset_path,
            args.num_prompts,
            speedup=args.trace_speedup,
            max_input_len=args.max_input_len,
            max_output_len=args.max_output_len,
        )
    if args.request_rate is None and args.dataset_path:
        return requests
    times = workload.arrivals(len(requests), args.request_rate or math.inf, args.burstiness, args.seed)
    return [msgspec.structs.replace(request, at=at) for request, at in zip(requests, times, strict=True)]


def _dataset(args: argparse.Namespace) -> str:
    name = args.dataset_name or ("trace" if args.dataset_path else "random")
    if (name == "trace") != bool(args.dataset_path):
        raise invalid("dataset_path", "is required for dataset_name trace, and not allowed for others")
    return str(name)


async def _load(args: argparse.Namespace, requests: list[Request]) -> tuple[str, list[Sample], float]:
    """Warm up and send everything; returns the model's name, the samples and the share of a core that this took."""
    from tqdm import tqdm

    async with _client(args) as client:
        model = await client.find_model()
        await _warm_up(client, requests, args)
        with tqdm(total=len(requests), desc="requests", unit="request", disable=None) as bar:
            worked, started = time.process_time(), time.perf_counter()
            samples = await client.send_all(requests, args.max_concurrency, lambda _: bar.update())
            busy = (time.process_time() - worked) / (time.perf_counter() - started)
    return model, samples, busy


def _client(args: argparse.Namespace) -> Client:
    from .client import Client

    body = {"temperature": args.temperature} | ({"model": args.model} if args.model else {})
    if args.ignore_eos:
        body["ignore_eos"] = True
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    return Client(
        base_url, args.endpoint, body | args.extra_body, headers | dict(args.header), args.seed, args.vocab_size
    )


async def _warm_up(client: Client, requests: list[Request], args: argparse.Namespace) -> None:
    """Also checks that the server accepts such requests, before many of them are sent.

    Raises:
        PenstockError: with what the server said, if it takes none.
    """
    from .workload import warmups

    samples = await client.send_all(warmups(requests, args.num_warmups), args.max_concurrency)
    if samples and not any(sample.outcome == "ok" for sample in samples):
        raise PenstockError(Code.UNAVAILABLE, f"{client.url} did not answer the warm-up: {samples[0].reason}")


def _conditions(args: argparse.Namespace, model: str, requests: list[Request]) -> dict[str, Any]:
    """Description of the benchmark, for its results."""
    rate = args.request_rate or (None if args.dataset_path else math.inf)
    return {
        "bench": "serve",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "base_url": args.base_url,
        "endpoint": args.endpoint,
        "model_id": model,
        "dataset_name": _dataset(args),
        "dataset_path": str(args.dataset_path) if args.dataset_path else None,
        "num_prompts": len(requests),
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": args.burstiness,
        "trace_speedup": args.trace_speedup,
        "max_concurrency": args.max_concurrency,
        "ignore_eos": args.ignore_eos,
        "seed": args.seed,
        "goodput": dict(args.goodput),
    }
