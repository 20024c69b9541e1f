"""The flags of ``penstock bench serve``, under the names that ``vllm bench serve`` gives them where it has them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from . import arg_types as values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("server"))
    _add_workload(parser.add_argument_group("workload"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_report(parser.add_argument_group("report"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="its address (default: http://127.0.0.1:8000)",
    )
    group.add_argument(
        "--endpoint",
        default="/v1/completions",
        metavar="PATH",
        help="/v1/completions gets token ids, so that input lengths are exact; /v1/chat/completions gets common words, "
        "about a token each, in the model's template (default: /v1/completions)",
    )
    group.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first that it lists)")
    group.add_argument(
        "--header", nargs="+", type=values.pair_of("="), default=[], metavar="KEY=VALUE", help="sent with every request"
    )
    group.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help="its key (default: $OPENAI_API_KEY)"
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=["random", "trace"],
        help="random prompts, or a trace's lengths, times and shared prefixes (default: trace if a path is given)",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="the trace: JSONL like Mooncake's (timestamp, input_length, output_length, hash_ids; equal ids become "
        "equal blocks of 512 tokens) or CSV like Azure's (TIMESTAMP,ContextTokens,GeneratedTokens)",
    )
    group.add_argument(
        "--num-prompts",
        type=values.integer_from(1),
        default=100,
        metavar="N",
        help="the trace's first N, too (default: 100)",
    )
    _add_lengths(group)
    group.add_argument(
        "--vocab-size",
        type=values.integer_from(2),
        default=3000,
        metavar="N",
        help="token ids in prompts are 1000 to N - 1 (default: 3000)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="generate the full length, where the server can")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    group.add_argument(
        "--extra-body", type=values.json_object, default={}, metavar="JSON", help="more fields of each request"
    )
    group.add_argument(
        "--seed",
        type=values.integer_from(0),
        default=0,
        metavar="N",
        help="of lengths, texts and arrivals; take another to miss a prefix cache that has seen this one (default: 0)",
    )


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    lengths = {
        "--random-input-len": (1, 128, "prompt"),
        "--random-output-len": (1, 64, "output"),
        "--random-prefix-len": (0, 0, "further tokens with which all prompts begin"),
        "--max-input-len": (0, 0, "clip the trace's prompts to this; 0 does not"),
        "--max-output-len": (0, 0, "clip the trace's outputs to this; 0 does not"),
    }
    for flag, (minimum, default, about) in lengths.items():
        help_text = f"{about} (default: {default})"
        group.add_argument(flag, type=values.integer_from(minimum), default=default, metavar="TOKENS", help=help_text)
    group.add_argument(
        "--random-range-ratio",
        type=values.share,
        default=0.0,
        metavar="SHARE",
        help="random lengths lie evenly between 1 - SHARE and 1 + SHARE times these (default: 0)",
    )


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=values.number,
        metavar="R",
        help="arrivals a second; inf sends as fast as --max-concurrency lets (default: inf; a trace has its own times)",
    )
    group.add_argument(
        "--burstiness",
        type=values.number,
        default=1.0,
        metavar="SHAPE",
        help="of the gamma-distributed gaps: 1 is Poisson, less comes in bursts, inf evenly (default: 1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=values.integer_from(0),
        default=0,
        metavar="N",
        help="requests at the same time; others wait here, which is in no latency (default: 0, no limit)",
    )
    group.add_argument(
        "--trace-speedup",
        type=values.number,
        default=1.0,
        metavar="X",
        help="play a trace X times as fast (default: 1)",
    )
    group.add_argument(
        "--num-warmups",
        type=values.integer_from(0),
        default=1,
        metavar="N",
        help="requests before, not measured (default: 1)",
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        type=values.goodput_limit,
        default=[],
        metavar="METRIC:MS",
        help="count requests within all these milliseconds, as in ttft:500 tpot:50 e2el:2000",
    )
    group.add_argument(
        "--percentile-metrics",
        type=values.metrics,
        default=list(values.METRICS),
        metavar="LIST",
        help="what to tell of (default: ttft,tpot,itl,e2el)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=values.percentiles,
        default=[90, 95, 99],
        metavar="LIST",
        help="besides mean and median (default: 90,95,99)",
    )
    group.add_argument(
        "--json",
        type=values.writable,
        metavar="FILE",
        help="write the figures there; - prints them in the table's place",
    )
    group.add_argument(
        "--picture",
        type=values.drawable,
        metavar="FILE.png",
        help="draw latencies and the course of the load (or svg, pdf)",
    )
