"""``penstock quantize``: writes a quantized checkpoint, calibrated where the method calls for it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from penstock.calibration.options import METHODS, ActOrder, KVCacheDtype, Method, QuantizeOptions

DYNAMIC_KV_CACHE = (
    "the KV cache needs no calibration: each vector has a scale of its own, computed when it is stored. The report "
    "measures with it; serve the checkpoint with --kv-cache-dtype {}"
)

ROTATED = (
    "weights are rotated: Penstock reads them, and so do systems that apply transform_config of compressed-tensors. "
    "Others, as transformers 5.24, ignore it and compute nonsense: make a checkpoint for these with --rotation 0"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = QuantizeOptions("")
    methods = "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder of a checkpoint, or its name on the hub; nothing for the built-in model",
    )
    parser.add_argument("--method", required=True, choices=METHODS, help=methods)
    parser.add_argument(
        "--output-dir", "--output_dir", required=True, type=Path, metavar="DIR", help="folder to write to, new or empty"
    )
    parser.add_argument(
        "--bits", type=int, default=0, metavar="N", help="bits of a weight: 4 or 8 with gptq (default: 4)"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=0,
        metavar="N",
        help=f"inputs that share a scale; -1: all (default: {_by_method(lambda method: method.format.group_size)})",
    )
    parser.add_argument(
        "--rotation",
        type=int,
        metavar="N",
        help="rotate weights and activations by Hadamard blocks of N inputs, at most 64, which loses less; written as "
        "compressed-tensors with a transform_config and, in 4 bits, some matrices in 8. 0: not rotated, one format for "
        f"all matrices, with gptq as AutoGPTQ writes it (default: {_by_method(lambda method: method.format.rotation)})",
    )
    parser.add_argument(
        "--act-order",
        choices=get_args(ActOrder),
        default=default.act_order,
        help="gptq: whether inputs with large activations are rounded first, in groups of neighbours (static) or of "
        f"inputs that follow each other in that order (group, desc_act) (default: {default.act_order})",
    )
    parser.add_argument(
        "--smoothing-strength",
        type=float,
        default=default.smoothing_strength,
        metavar="ALPHA",
        help=f"smoothquant: 0 leaves activations as they are (default: {default.smoothing_strength})",
    )
    parser.add_argument(
        "--calib-dataset",
        default="",
        metavar="FILE",
        help="texts: JSON or Parquet with text, messages or prompt, or plain text (default: built in, see docs)",
    )
    for name, unit, about in (
        ("calib_size", "samples", "to calibrate on"),
        ("calib_seq_len", "tokens", "of a sample"),
        ("eval_size", "samples", "further ones, on which the report measures, an eighth of all at most"),
        ("seed", "int", "of the choice of samples"),
    ):
        value = getattr(default, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=value, metavar=unit.upper(), help=f"{about} (default: {value})")
    parser.add_argument(
        "--ignore",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="matrices to leave unquantized, by the end of their name: down_proj, 'layers.0.*' (default: none)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default=default.kv_cache_dtype,
        help="of the KV cache that the report measures with; needs no calibration (default: auto)",
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="to compute with (default: all cores)")


def _by_method(value: Callable[[Method], int]) -> str:
    """A default that depends on the method: ``32 of wint4, w4a8; 64 of gptq``."""
    names: dict[int, list[str]] = {}
    for name, method in METHODS.items():
        names.setdefault(value(method), []).append(name)
    return "; ".join(f"{number} of {', '.join(of)}" for number, of in names.items() if number)


def run(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in QuantizeOptions.__struct_fields__ if hasattr(args, name)}
    options = QuantizeOptions(**given | {"ignore": tuple(args.ignore)})
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
