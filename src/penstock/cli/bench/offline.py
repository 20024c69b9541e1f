"""``penstock bench latency|throughput``: speed of the engine without a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..flags import add_fields, add_model, add_options, options_of, read_fields
from ..interrupts import ending_at_ctrl_c
from ..screen import print_json
from .dataset_options import DatasetOptions
from .offline_options import LatencyOptions, ThroughputOptions

if TYPE_CHECKING:
    from penstock.frontend.llm import LLM

SYNONYMS = ("elapsed_time", "num_requests", "requests_per_second", "tokens_per_second")
"""vLLM's names of figures that have another name here: only in JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_options(parser, profiles=True)
    if parser.prog.endswith("latency"):
        of_datasets = {*DatasetOptions.__struct_fields__} - {"input_len", "output_len"}
        add_fields(parser, LatencyOptions, without=of_datasets, profiles=True)
    else:
        add_fields(parser, ThroughputOptions, profiles=True)


def run(args: argparse.Namespace) -> int:
    options = read_fields(args, LatencyOptions) if args.kind == "latency" else read_fields(args, ThroughputOptions)
    options.check()
    with ending_at_ctrl_c():
        from penstock.frontend.llm import LLM

    engine_options = options_of(args) | {"enable_prefix_caching": False}
    llm = LLM(engine_options.pop("model"), **engine_options)
    if isinstance(options, LatencyOptions):
        measured = latency(llm, options)
    else:
        measured = throughput(llm, options, show=not args.json)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results = {"bench": args.kind, "kernels": llm.engine.info.fingerprint, **measured, "peak_memory_gib": peak}
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(results, indent=4))
    if args.json:
        print_json(results)
        return 0
    percentiles = {f"percentile {name}": value for name, value in results.get("percentiles", {}).items()}
    for name, value in (results | percentiles).items():
        if not isinstance(value, list | dict) and name not in SYNONYMS:
            print(f"{name:<22} {value:,.4g}" if isinstance(value, float) else f"{name:<22} {value}")
    return 0


def latency(llm: LLM, options: LatencyOptions) -> dict[str, Any]:
    """Latency of a batch in seconds, also under vLLM's names, and speed of prefill and decode."""
    from .generation import generate
    from .report import percentiles_of
    from .workload import random_requests

    def measure(output_len: int) -> list[float]:
        requests = random_requests(options.batch_size, options.input_len, output_len)
        repetitions = options.num_iters_warmup + options.num_iters
        return [generate(llm, requests, options).seconds for _ in range(repetitions)][options.num_iters_warmup :]

    whole, first = measure(options.output_len), measure(1)
    middle, prefill = statistics.median(whole), statistics.median(first)
    steps = max(options.output_len - 1, 1)
    return {
        "batch": options.batch_size,
        "input_tokens": options.input_len,
        "output_tokens": options.output_len,
        "median_s": middle,
        "best_s": min(whole),
        "worst_s": max(whole),
        "avg_latency": statistics.mean(whole),
        "std_latency": statistics.pstdev(whole),
        "latencies": whole,
        "percentiles": percentiles_of(whole),
        "prefill_tokens_per_s": options.batch_size * options.input_len / prefill,
        "decode_tokens_per_s": options.batch_size * options.n * steps / max(middle - prefill, 1e-9),
    }


def throughput(llm: LLM, options: ThroughputOptions, show: bool) -> dict[str, Any]:
    """Throughput in requests and tokens per second, also under vLLM's names, with all prompts queued at the start."""
    from .datasets import create_requests, read_rows
    from .generation import generate
    from .workload import random_requests

    requests = asyncio.run(create_requests(options, read_rows(options), EngineTokenizer(llm)))
    generate(llm, random_requests(1, min(requests[0].input_len or 128, 128), 2, seed=1), options)
    done = generate(llm, requests, options, show)
    total = done.input_tokens + done.output_tokens
    return {
        "prompts": len(requests),
        "input_tokens": done.input_tokens,
        "output_tokens": done.output_tokens,
        "seconds": done.seconds,
        "requests_per_s": len(requests) / done.seconds,
        "output_tokens_per_s": done.output_tokens / done.seconds,
        "total_tokens_per_s": total / done.seconds,
        "preemptions": llm.engine.scheduler.num_preemptions,
        "elapsed_time": done.seconds,
        "num_requests": len(requests),
        "total_num_tokens": total,
        "requests_per_second": len(requests) / done.seconds,
        "tokens_per_second": total / done.seconds,
    }


class EngineTokenizer:
    """Tokenizer of a local engine, for datasets with text."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.get_tokenizer()

    async def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without special tokens."""
        return [len(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
