"""``penstock bench serve``: load test of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..flags import add_fields, read_fields
from .serve_options import ServeOptions

if TYPE_CHECKING:
    from .client import Client
    from .sample import Sample
    from .workload import Request

STANDARD_OUTPUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser, ServeOptions)


def run(args: argparse.Namespace) -> int:
    """Run the load test and print the results; the exit status is 1 if no request succeeded."""
    options = read_fields(args, ServeOptions)
    options.check()
    _need("aiohttp")
    if options.picture:
        _need("matplotlib")
    from . import report

    requests = _requests(options)
    model, samples, busy = asyncio.run(_load(options, requests))
    if not any(sample.outcome == "ok" for sample in samples):
        print(f"penstock bench: none of {len(samples):,} requests succeeded: {samples[0].reason}", file=sys.stderr)
        return 1
    percentiles, metrics, goodput = options.percentiles, options.metrics, options.limits
    measured = report.compute_results(samples, percentiles, metrics, goodput)
    results = _conditions(options, model, requests) | measured | {"client_cpu": busy}
    if options.json != STANDARD_OUTPUT:
        print(report.table(results, percentiles, metrics))
    if options.json:
        text = json.dumps(results, indent=1) + "\n"
        print(text, end="") if options.json == STANDARD_OUTPUT else Path(options.json).write_text(text)
    if options.picture:
        from .plot import draw

        rates = f"{results['request_throughput']:,.3g} requests/s, {results['output_throughput']:,.4g} output tokens/s"
        draw(samples, goodput, f"{model}: {results['completed']:,} requests, {rates}", Path(options.picture))
    return 0


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise PenstockError(
            Code.UNSUPPORTED, f"bench serve needs {package}, which is not installed: pip install 'penstock-llm[bench]'"
        )


def _requests(options: ServeOptions) -> list[Request]:
    """Create the requests, in order of arrival."""
    from . import workload

    if _dataset(options) == "random":
        requests = workload.random_requests(
            options.num_prompts,
            options.random_input_len,
            options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            seed=options.seed,
        )
    else:
        requests = workload.read_trace(
            Path(options.dataset_path),
            options.num_prompts,
            speedup=options.trace_speedup,
            max_input_len=options.max_input_len,
            max_output_len=options.max_output_len,
        )
    if not options.request_rate and options.dataset_path:
        return requests
    times = workload.arrivals(len(requests), options.request_rate or math.inf, options.burstiness, options.seed)
    return [msgspec.structs.replace(request, at=at) for request, at in zip(requests, times, strict=True)]


def _dataset(options: ServeOptions) -> str:
    name = options.dataset_name or ("trace" if options.dataset_path else "random")
    if (name == "trace") != bool(options.dataset_path):
        problem = "is required with" if name == "trace" else "cannot be combined with"
        raise invalid("dataset_path", f"{problem} dataset_name {name}")
    return str(name)


async def _load(options: ServeOptions, requests: list[Request]) -> tuple[str, list[Sample], float]:
    """Warm up and send all requests; returns the model's name, the samples, and the client's use of a core (0 to 1)."""
    from tqdm import tqdm

    async with _client(options) as client:
        model = await client.find_model()
        await _warm_up(client, requests, options)
        with tqdm(total=len(requests), desc="requests", unit="request", disable=None) as bar:
            worked, started = time.process_time(), time.perf_counter()
            samples = await client.send_all(requests, options.max_concurrency, lambda _: bar.update())
            busy = (time.process_time() - worked) / (time.perf_counter() - started)
    return model, samples, busy


def _client(options: ServeOptions) -> Client:
    from .client import Client

    body = {"temperature": options.temperature} | ({"model": options.model} if options.model else {})
    if options.ignore_eos:
        body["ignore_eos"] = True
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base_url = options.base_url.rstrip("/").removesuffix("/v1")
    return Client(
        base_url, options.endpoint, body | options.body, headers | options.headers, options.seed, options.vocab_size
    )


async def _warm_up(client: Client, requests: list[Request], options: ServeOptions) -> None:
    """Send warm-up requests, which also check that the server accepts such requests.

    Raises ``PenstockError`` with the server's error if all of them fail.
    """
    from .workload import warmups

    samples = await client.send_all(warmups(requests, options.num_warmups), options.max_concurrency)
    if samples and not any(sample.outcome == "ok" for sample in samples):
        raise PenstockError(Code.UNAVAILABLE, f"{client.url}: the warm-up requests failed: {samples[0].reason}")


def _conditions(options: ServeOptions, model: str, requests: list[Request]) -> dict[str, Any]:
    """Parameters of the benchmark, for its results."""
    rate = options.request_rate or (None if options.dataset_path else math.inf)
    return {
        "bench": "serve",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "base_url": options.base_url,
        "endpoint": options.endpoint,
        "model_id": model,
        "dataset_name": _dataset(options),
        "dataset_path": options.dataset_path or None,
        "num_prompts": len(requests),
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": options.burstiness,
        "trace_speedup": options.trace_speedup,
        "max_concurrency": options.max_concurrency,
        "ignore_eos": options.ignore_eos,
        "seed": options.seed,
        "goodput": options.limits,
    }
