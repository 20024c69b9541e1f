"""``penstock quantize``: writes a quantized checkpoint, calibrated where the method calls for it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from penstock.calibration.options import METHODS, QuantizeOptions
from penstock.core.quantization import Format

from .flags import add_fields, read_fields

DYNAMIC_KV_CACHE = (
    "the KV cache needs no calibration: each vector has a scale of its own, computed when it is stored. The report "
    "measures with it; serve the checkpoint with --kv-cache-dtype {}"
)

ROTATED = (
    "weights are rotated: Penstock reads them, and so do systems that apply transform_config of compressed-tensors. "
    "Others, as transformers 5.24, ignore it and compute nonsense: make a checkpoint for these with --rotation 0"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder of a checkpoint, or its name on the hub; nothing for the built-in model",
    )
    methods = "; ".join(f"{name}: {method.about}{_sizes(method.format)}" for name, method in METHODS.items())
    parser.add_argument("--method", required=True, choices=METHODS, help=methods)
    parser.add_argument(
        "--output-dir", "--output_dir", required=True, type=Path, metavar="DIR", help="folder to write to, new or empty"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="to compute with (default: all cores)")
    add_fields(parser, QuantizeOptions, without=("method", "calib_texts"))


def _sizes(format: Format) -> str:
    """A method's default sizes, for the help."""
    groups = f", groups of {format.group_size}" if format.group_size else ""
    return groups + (f", rotated by {format.rotation}" if format.rotation else "")


def run(args: argparse.Namespace) -> int:
    options = read_fields(args, QuantizeOptions)
    write_quantized(args.model, args.output_dir, options, args.threads)
    if options.kv_cache_dtype != "auto":
        print(DYNAMIC_KV_CACHE.format(options.kv_cache_dtype))
    return 0


def write_quantized(model: str | Path, output: Path, options: QuantizeOptions, threads: int = 0) -> None:
    """Quantize a checkpoint, with a progress bar, and print what the report says.

    Args:
        model: a folder, or a name on the hub; empty for the built-in model.
        output, options, threads: as of ``calibration.quantize.quantize``, which says what is raised.
    """
    options.check()
    from penstock.calibration.quantize import quantize
    from penstock.calibration.report import PAGE, summary
    from penstock.frontend.hub import resolve

    started = time.monotonic()
    try:
        report = quantize(resolve(model), output, options, threads=threads)
    except KeyboardInterrupt:
        print(f"{output} is not finished: the same command goes on with it", file=sys.stderr)
        raise
    print(summary(report))
    if report["job"]["rotation"] != 0 and options.format.rotation:
        print(ROTATED)
    print(f"{output} is ready after {time.monotonic() - started:.0f} s; see {output / PAGE}")
