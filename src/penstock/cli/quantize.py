"""``penstock quantize``: write a quantized checkpoint, calibrated if the method needs it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from penstock.calibration.options import METHODS, QuantizeOptions
from penstock.core.quantization import Format

from .flags import add_fields, read_fields
from .interrupts import ending_at_ctrl_c

DYNAMIC_KV_CACHE = (
    "the KV cache needs no calibration: each vector has a separate scale, computed when it is stored. The report "
    "includes its effect; serve the checkpoint with --kv-cache-dtype {}"
)

ROTATED = (
    "weights are rotated, which Penstock and systems that apply transform_config of compressed-tensors support. Other "
    "systems (transformers 5.24) ignore it and compute wrong results: write checkpoints for them with --rotation 0"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder of a checkpoint, or its name on the hub (default: the built-in model)",
    )
    methods = "; ".join(f"{name}: {method.about}{_sizes(method.format)}" for name, method in METHODS.items())
    parser.add_argument("--method", required=True, choices=METHODS, help=methods)
    parser.add_argument(
        "--output-dir", "--output_dir", required=True, type=Path, metavar="DIR", help="new or empty output folder"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="number of threads (default: all cores)")
    add_fields(parser, QuantizeOptions, without=("method", "calib_texts"))


def _sizes(format: Format) -> str:
    """Default group and rotation sizes of a method, for the help."""
    groups = f", groups of {format.group_size}" if format.group_size else ""
    return groups + (f", rotated by {format.rotation}" if format.rotation else "")


def run(args: argparse.Namespace) -> int:
    options = read_fields(args, QuantizeOptions)
    write_quantized(args.model, args.output_dir, options, args.threads)
    if options.kv_cache_dtype != "auto":
        print(DYNAMIC_KV_CACHE.format(options.kv_cache_dtype))
    return 0


def write_quantized(model: str | Path, output: Path, options: QuantizeOptions, threads: int = 0) -> None:
    """Quantize a checkpoint with a progress bar, and print a summary of the report.

    Args:
        model: a folder, or a name on the hub; empty: the built-in model.
        output, options, threads: as for ``calibration.quantize.quantize``, which also documents the errors.
    """
    options.check()
    with ending_at_ctrl_c():
        from penstock.calibration.quantize import quantize
    from penstock.calibration.report import PAGE, summary
    from penstock.frontend.hub import resolve

    started = time.monotonic()
    try:
        report = quantize(resolve(model), output, options, threads=threads)
    except KeyboardInterrupt:
        print(f"{output} is incomplete: run the same command to resume", file=sys.stderr)
        raise
    print(summary(report))
    if report["job"]["rotation"] != 0 and options.format.rotation:
        print(ROTATED)
    print(f"{output} was written in {time.monotonic() - started:.0f} s; see {output / PAGE}")
