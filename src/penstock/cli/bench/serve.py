"""``penstock bench serve``: load test of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.core import Code, PenstockError

from ..flags import add_fields, read_fields
from ..screen import print_json
from .serve_options import ServeOptions

if TYPE_CHECKING:
    from .client import Client
    from .sample import Sample
    from .server_tokenizer import ServerTokenizer
    from .workload import Request

STANDARD_OUTPUT = "-"
POLL_INTERVAL = 1.0  # seconds between two attempts of ready_timeout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser, ServeOptions, profiles=True)


def run(args: argparse.Namespace) -> int:
    """Run the load test and print the results; the exit status is 1 if no request succeeded."""
    options = read_fields(args, ServeOptions)
    options.check()
    _need("aiohttp")
    if options.picture:
        _need("matplotlib")
    from . import report
    from .results import conditions, write

    load = asyncio.run(_load(options))
    samples = load.samples
    if not any(sample.outcome == "ok" for sample in samples):
        print(f"penstock bench: none of {len(samples):,} requests succeeded: {samples[0].reason}", file=sys.stderr)
        return 1
    measured = report.compute_results(samples, options.percentiles, options.metrics, options.limits)
    results = conditions(options, load.model, len(samples)) | measured | {"client_cpu": load.client_cpu}
    if options.json != STANDARD_OUTPUT:
        print(report.table(results, options.percentiles, options.metrics))
    if options.save_detailed:
        results |= report.details(samples)
    if options.json == STANDARD_OUTPUT:
        print_json(results)
    elif options.json:
        write(options, results)
    if options.picture:
        from .plot import draw

        rates = f"{results['request_throughput']:,.3g} requests/s, {results['output_throughput']:,.4g} output tokens/s"
        title = f"{load.model}: {results['completed']:,} requests, {rates}"
        draw(samples, options.limits, title, Path(options.picture))
    return 0


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise PenstockError(
            Code.UNSUPPORTED, f"bench serve needs {package}, which is not installed: pip install 'penstock-llm[bench]'"
        )


class Load(NamedTuple):
    """Results of a load."""

    model: str
    """Name of the model."""
    samples: list[Sample]
    client_cpu: float
    """Share of a core that the client used, 0 to 1."""


async def _load(options: ServeOptions) -> Load:
    """Warm up and send all requests."""
    from tqdm import tqdm

    from .datasets import read_rows

    rows = read_rows(options)
    async with _client(options) as client:
        model = await _when_ready(client, options)
        requests = await _requests(options, rows, client.tokenizer(model))
        await _warm_up(client, requests, options)
        show = None if options.progress else True  # None: only in a terminal
        with tqdm(total=len(requests), desc="requests", unit="request", disable=show) as bar:
            worked, started = time.process_time(), time.perf_counter()
            samples = await client.send_all(requests, options.max_concurrency, lambda _: bar.update())
            busy = (time.process_time() - worked) / (time.perf_counter() - started)
    return Load(options.model or model, samples, busy)


async def _requests(options: ServeOptions, rows: list[Any], tokenizer: ServerTokenizer) -> list[Request]:
    """Create the requests, in order of arrival."""
    from .datasets import create_requests

    requests = await create_requests(options, rows, tokenizer)
    if options.chat_template and options.kind == "openai" and requests[0].text:
        ids = await tokenizer.render([request.text for request in requests], options.template_kwargs)
        requests = [
            msgspec.structs.replace(request, token_ids=tuple(each), num_tokens=0)
            for request, each in zip(requests, ids, strict=True)
        ]
    return _scheduled(_with_adapters(requests, options), options)


def _with_adapters(requests: list[Request], options: ServeOptions) -> list[Request]:
    if not options.lora_modules:
        return requests
    names: Iterator[str] = itertools.cycle(options.lora_modules)
    if options.lora_assignment == "random":
        names = iter(Random(options.seed).choices(options.lora_modules, k=len(requests)))
    return [msgspec.structs.replace(request, model=next(names)) for request in requests]


def _scheduled(requests: list[Request], options: ServeOptions) -> list[Request]:
    """Set the arrival times; the times of a trace are kept without a request rate."""
    from . import workload

    if options.ramp_up_strategy:
        start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
        exponential = options.ramp_up_strategy == "exponential"
        times = workload.ramp(len(requests), start, end, exponential, options.burstiness, options.seed)
    elif not options.request_rate and options.dataset == "trace":
        return requests
    else:
        times = workload.arrivals(len(requests), options.request_rate or math.inf, options.burstiness, options.seed)
    return [msgspec.structs.replace(request, at=at) for request, at in zip(requests, times, strict=True)]


def _client(options: ServeOptions) -> Client:
    from .client import Client

    name = options.served_model_name or options.model
    body: dict[str, Any] = {"model": name} if name else {}
    if not options.embeddings and options.temperature is not None:
        body["temperature"] = options.temperature
    if options.ignore_eos and not options.embeddings:
        body["ignore_eos"] = True
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Client(
        options.base_url.rstrip("/").removesuffix("/v1"),
        options.api,
        body | options.body,
        headers | options.headers,
        options.seed,
        options.vocab_size,
        kind=options.kind,
        request_id_prefix=options.request_id_prefix,
        insecure=options.insecure,
        keep_text=options.save_detailed,
    )


async def _when_ready(client: Client, options: ServeOptions) -> str:
    """Name of the model, when the server answers a request of one token; waits at most ``ready_timeout`` seconds.

    Raises ``PenstockError`` with the server's error if the time is over.
    """
    from .workload import WARMUPS, Request

    test = Request(((WARMUPS - 1, 1),), 1)
    clock = asyncio.get_running_loop().time
    ends = clock() + options.ready_timeout
    while True:
        try:
            async with asyncio.timeout_at(ends if options.ready_timeout else None):
                model = await client.find_model()
                if not options.ready_timeout:
                    return model
                (sample,) = await client.send_all([test], 1)
            if sample.outcome == "ok":
                return model
            error = PenstockError(Code.UNAVAILABLE, f"{client.url} is not ready: {sample.reason}")
        except PenstockError as problem:
            error = problem
        except TimeoutError:
            message = f"{client.url} does not answer within {options.ready_timeout:g} seconds (--ready-timeout)"
            error = PenstockError(Code.UNAVAILABLE, message)
        if clock() > ends:
            raise error
        await asyncio.sleep(POLL_INTERVAL)


async def _warm_up(client: Client, requests: list[Request], options: ServeOptions) -> None:
    """Send warm-up requests, which also check that the server accepts such requests.

    Raises ``PenstockError`` with the server's error if all of them fail.
    """
    from .workload import warmups

    samples = await client.send_all(warmups(requests, options.num_warmups), options.max_concurrency)
    if samples and not any(sample.outcome == "ok" for sample in samples):
        raise PenstockError(Code.UNAVAILABLE, f"{client.url}: the warm-up requests failed: {samples[0].reason}")
