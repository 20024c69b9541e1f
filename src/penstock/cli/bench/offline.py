"""``penstock bench latency|throughput``: speed of the engine without a server, with random prompts."""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from random import Random
from typing import TYPE_CHECKING, Any

from ..flags import add_model, add_options, options_of
from ..screen import print_json

if TYPE_CHECKING:
    from penstock.frontend.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--input-len", type=int, default=128, help="tokens per prompt (default: 128)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate per prompt (default: 64)")
    parser.add_argument("--batch-size", type=int, default=1, help="latency: number of sequences (default: 1)")
    parser.add_argument("--num-iters", type=int, default=5, help="latency: number of repetitions (default: 5)")
    parser.add_argument("--num-prompts", type=int, default=64, help="throughput: number of prompts (default: 64)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.frontend.llm import LLM

    options = options_of(args) | {"enable_prefix_caching": False}
    llm = LLM(options.pop("model"), **options)
    results = (latency if args.kind == "latency" else throughput)(llm, args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results = {"bench": args.kind, "kernels": llm.engine.info.fingerprint, **results, "peak_memory_gib": peak}
    if args.json:
        print_json(results)
    else:
        for name, value in results.items():
            print(f"{name:<22} {value:,.4g}" if isinstance(value, float) else f"{name:<22} {value}")
    return 0


def latency(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Latency of a batch in seconds, and speed of prefill and decode."""
    whole = [_timed(llm, args.batch_size, args.input_len, args.output_len) for _ in range(args.num_iters + 1)][1:]
    first = [_timed(llm, args.batch_size, args.input_len, 1) for _ in range(args.num_iters + 1)][1:]
    middle, prefill = statistics.median(whole), statistics.median(first)
    steps = max(args.output_len - 1, 1)
    return {
        "batch": args.batch_size,
        "input_tokens": args.input_len,
        "output_tokens": args.output_len,
        "median_s": middle,
        "best_s": min(whole),
        "worst_s": max(whole),
        "prefill_tokens_per_s": args.batch_size * args.input_len / prefill,
        "decode_tokens_per_s": args.batch_size * steps / max(middle - prefill, 1e-9),
    }


def throughput(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Throughput in requests and tokens per second, with all prompts queued at the start."""
    _timed(llm, 1, min(args.input_len, 128), 2)
    seconds = _timed(llm, args.num_prompts, args.input_len, args.output_len, show=not args.json)
    return {
        "prompts": args.num_prompts,
        "input_tokens": args.num_prompts * args.input_len,
        "output_tokens": args.num_prompts * args.output_len,
        "seconds": seconds,
        "requests_per_s": args.num_prompts / seconds,
        "output_tokens_per_s": args.num_prompts * args.output_len / seconds,
        "total_tokens_per_s": args.num_prompts * (args.input_len + args.output_len) / seconds,
        "preemptions": llm.engine.scheduler.num_preemptions,
    }


def _timed(llm: LLM, sequences: int, input_len: int, output_len: int, show: bool = False) -> float:
    from penstock.core import SamplingParams

    rng, vocabulary = Random(0), llm.engine.info.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(input_len)] for _ in range(sequences)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=show)
    return time.perf_counter() - started
