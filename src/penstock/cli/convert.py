"""``penstock convert``: rewrite a checkpoint as safetensors, with another shard size or data type."""

from __future__ import annotations

import argparse
from pathlib import Path

from .byte_size import byte_size
from .flags import add_model, add_options, configure
from .interrupts import ending_at_ctrl_c

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model (as for --model), or an engine folder")
    parser.add_argument("--output-dir", "--output_dir", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument(
        "--max-shard-size",
        "--max_shard_size",
        type=byte_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="maximum size of a file, such as 5GB or 500MiB (default: 5GB)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="data type of floating-point tensors, except tensors of quantized matrices (default: unchanged)",
    )
    parser.add_argument(
        "--to", choices=("safetensors",), default="safetensors", help="output format (default: safetensors)"
    )
    add_options(parser, (), ("model", "revision", "hf_token", "download_dir"))


def run(args: argparse.Namespace) -> int:
    from penstock.config.progress import Progress, print_line

    from .serve import download_model

    folder = Path(download_model(configure(args, "convert").configuration).engine.model)
    with ending_at_ctrl_c():
        import torch

        from penstock.models.convert import convert

    dtype = getattr(torch, args.dtype) if args.dtype else None
    with Progress("written", 0, "B", print_line("convert")) as bar:
        count = convert(folder, args.output_dir, dtype=dtype, max_shard_size=args.max_shard_size, progress=bar.set)
    print(f"{args.output_dir}: a checkpoint in {count} safetensors {'file' if count == 1 else 'files'}")
    return 0
