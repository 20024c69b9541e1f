"""``penstock build``: pack a model's weights into an engine folder, which ``serve`` memory-maps."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.checkpoint.engine_config import RECORDED
from penstock.core.errors import invalid

from .build_folder import build, describe
from .byte_size import byte_size
from .flags import add_model, add_options, configure

OPTIONS = (
    *("model", "revision", "hf_token", "download_dir", "compat", "device", "ops", "threads", "dtype", "quantization"),
    *("tensor_parallel_size", "pipeline_parallel_size", "pipeline_parallel_layers", *RECORDED),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--output-dir", "--output_dir", type=Path, required=True, help="the new engine folder")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="number of processes that pack ranks (default: 1)"
    )
    parser.add_argument(
        "--max-shard-size",
        "--max_shard_size",
        type=byte_size,
        default=2**30,
        metavar="SIZE",
        help="approximate size of a file, such as 5GB or 500MB; a worker needs as much memory (default: 1GiB)",
    )
    add_options(parser, (), OPTIONS)


def run(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise invalid("workers", f"must be at least 1, is {args.workers}", 1)
    resolved = configure(args, "build")
    from .serve import download_model

    options = download_model(resolved.configuration).engine
    given = {name: getattr(options, name) for name in RECORDED}
    unset = {
        name for name, source in resolved.sources.items() if source == "default" or source.startswith("the profile")
    }
    recorded = {name: value for name, value in given.items() if name not in unset}
    config = build(
        options, args.output_dir, recorded=recorded, workers=args.workers, max_shard_size=args.max_shard_size
    )
    print(f"{args.output_dir}: {describe(config)}")
    return 0
