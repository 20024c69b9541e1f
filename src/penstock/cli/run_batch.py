"""``penstock run-batch``: process a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock import demo
from penstock.config.options import Configuration, EngineOptions
from penstock.config.progress import Progress, print_line
from penstock.core.errors import invalid
from penstock.engine.service.engine_processes import EngineProcesses
from penstock.engine.service.pool import ResumePolicy
from penstock.frontend.gateway import Gateway
from penstock.frontend.input_processor import InputProcessor
from penstock.serve.dialects.openai.batch import BatchError, BatchResponse
from penstock.serve.dialects.openai.batches.results import BatchState, Results, check_input, requests, survey
from penstock.serve.dialects.openai.batches.work import Work
from penstock.serve.metrics import Metrics
from penstock.serve.models.keep_alive import KeepAlive
from penstock.serve.models.messages import ModelEntry
from penstock.serve.models.served_models import ServedModel, ServedModels

from .flags import add_options, configure
from .serve import download_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="file of requests, one JSON object per line",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="file for the results, one per line in order of completion; requests with a result in it are skipped",
    )
    parser.add_argument(
        "--max-concurrency",
        dest="at_once",  # "max_concurrency" would be read as the server's option
        type=int,
        metavar="REQUESTS",
        help="maximum number of concurrent requests (default: twice --max-num-seqs, if --max-waiting allows)",
    )
    add_options(parser, ("model", "engine", "log"), ("served_model_name",), profiles=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0 if all lines have a successful result, from this run or an earlier one."""
    configuration = configure(args, "run-batch").configuration
    at_once = max_concurrency(configuration.engine) if args.at_once is None else args.at_once
    if at_once < 1:
        raise invalid("max_concurrency", f"must be at least 1, is {at_once}", 1)
    check_input(args.input_file)
    with Results(args.output_file) as results:
        result = survey(requests(args.input_file), results)
        if not result.left:
            message = f"all {result.skipped} lines already have a result, {result.failed} of them failed"
            print(f"penstock run-batch: {message}", file=sys.stderr)
            return int(result.failed > 0)
        good = asyncio.run(_answer(configuration, args.input_file, results, result, min(at_once, result.left)))
    return int(result.failed > 0 or not good)


def max_concurrency(options: EngineOptions) -> int:
    """Default number of concurrent requests: keeps the engine busy without exceeding its queue."""
    return options.data_parallel_size * (options.max_num_seqs + min(options.max_num_seqs, options.max_waiting))


async def _answer(configuration: Configuration, path: Path, results: Results, state: BatchState, at_once: int) -> bool:
    """Process the remaining lines; returns True if all of them got a successful result."""
    async with _engine(configuration) as (service, watch):
        with Progress("requests", state.left, "request", print_line("run-batch")) as bar:
            first_failure = ""

            def record(custom_id: str | None, response: BatchResponse | None, error: BatchError | None) -> None:
                nonlocal first_failure
                results.add(custom_id, response, error)
                first_failure = first_failure or failure_of(custom_id, response, error)
                bar.update()

            work, started = Work(lambda line: service, watch, record), time.monotonic()
            left = (line for line in requests(path) if results.find(line) is None)
            try:
                await work.run(left, at_once)
            finally:
                bar.close()
                if first_failure:
                    print(f"penstock run-batch: the first that failed: {first_failure}", file=sys.stderr)
                print(_summary(work, state, time.monotonic() - started), file=sys.stderr)
    return work.failed == 0 and not work.stopped


@asynccontextmanager
async def _engine(configuration: Configuration) -> AsyncIterator[tuple[ServedModel, asyncio.Task[None]]]:
    """Run an engine; yields its service, and the task that restarts the engine."""
    model = configuration.engine.model
    resolved = download_model(configuration).engine
    input_processor = InputProcessor(Path(resolved.model), configuration.model, configuration.engine.max_output_len)
    process = EngineProcesses(resolved, configuration.log)
    await process.start()
    options = configuration.engine
    gateway = Gateway(
        process.addresses, input_processor, options.data_parallel_request_cost, resume=ResumePolicy.of(options)
    )
    watch = asyncio.create_task(process.watch())
    names = configuration.server.served_model_name or (model or demo.NAME,)
    try:
        await gateway.engine_pool.ready()
        served_models = ServedModels(configuration.server, Metrics())
        entry = ModelEntry(names=names, configuration=configuration, kserve={})
        yield served_models.add(entry, gateway, KeepAlive(gateway.engine_pool)), watch
    finally:
        await process.close()
        await watch
        await gateway.close()


def failure_of(custom_id: str | None, response: BatchResponse | None, error: BatchError | None) -> str:
    """Why a line has no successful result; empty if it has one."""
    if error:
        return error.message
    if response is None or response.status_code == 200:
        return ""
    body = msgspec.json.decode(response.body)
    message = body.get("error", {}).get("message") if isinstance(body, dict) else None
    return f"{custom_id}: {message or f'status {response.status_code}'}"


def _summary(work: Work, state: BatchState, seconds: float) -> str:
    summary = f"{work.answered} answered, {work.failed} failed, {state.skipped} skipped"
    if state.failed:
        summary += f" ({state.failed} of them failed earlier)"
    summary += f"; {work.tokens} tokens, {work.tokens / seconds:.1f} tokens/s"
    left = state.left - work.answered - work.failed
    if left or work.stopped:
        died = "the engine has died too often, " if work.stopped else ""
        summary += f"; {died}{left} left: run the same command to continue"
    return f"penstock run-batch: {summary}"
