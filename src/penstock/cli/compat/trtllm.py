"""TensorRT-LLM's offline tools: ``convert_checkpoint.py``, ``quantize.py`` and ``trtllm-build``.

Checkpoints are neither converted nor compiled. The first two commands check their arguments and record them in
``config.json`` (``engine_folder.py``); ``trtllm-build`` packs the weights (``penstock build``) for ``tritonserver``.
Formats with calibration are quantized like ``penstock quantize`` to a checkpoint in the output folder; other formats
are quantized when weights are packed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.calibration.options import QuantizeOptions
from penstock.checkpoint.engine_config import RECORDED
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

from ..build_folder import build as build_folder
from ..build_folder import describe, engine_options
from ..parser import exit_status
from ..quantize import write_quantized
from . import engine_folder

DTYPES = ("auto", "float32", "float16", "bfloat16")
ALGORITHMS = {
    "full_prec": None,
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
    "int8_sq": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    "fp8": "FP8",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int4_gptq": "W4A16_GPTQ",
}
"""``quant_algo`` by format."""
METHODS = {"int8_sq": "smoothquant", "fp8": "fp8", "int4_awq": "awq", "w4a8_awq": "awq", "int4_gptq": "gptq"}
"""Method of ``penstock quantize`` by format. Other formats are unquantized, or quantized at load."""
CACHES = {None: None, "int8": "INT8", "fp8": "FP8"}
"""``kv_cache_quant_algo`` by ``kv_cache_dtype``."""
CALIBRATION = {
    "calib_size": "calib_size",
    "calib_dataset": "calib_dataset",
    "calib_max_seq_length": "calib_seq_len",
    "awq_block_size": "group_size",
}
"""Options of ``penstock quantize`` by calibration flag."""
SIZES = {"tp_size": "tensor-parallel ranks", "pp_size": "pipeline stages"}
ALWAYS_PAGED = "the KV cache is always paged"
ABOUT_ENGINE = "Written by penstock: weights packed for its kernels."
NO_KERNELS = "kernels are selected when the server starts"
NO_BUILD = "nothing is compiled"
BUILD_LIMITS = ("max_batch_size", "max_num_tokens", "max_input_len", "max_output_len", "max_seq_len", "max_beam_width")
BUILD_IGNORED = {
    **dict.fromkeys(
        (
            *("gpt_attention_plugin", "gemm_plugin", "context_fmha", "use_custom_all_reduce", "reduce_fusion"),
            *("use_paged_context_fmha", "multiple_profiles", "remove_input_padding", "bert_attention_plugin"),
            *("moe_plugin", "nccl_plugin", "enable_xqa", "multi_block_mode", "builder_opt"),
        ),
        NO_KERNELS,
    ),
    **dict.fromkeys(("log_level", "input_timing_cache", "output_timing_cache"), NO_BUILD),
    "use_fp8_context_fmha": "attention uses the data type of the KV cache",
    "tokens_per_block": "use --block-size of the server",
    "opt_num_tokens": NO_KERNELS,
    "opt_batch_size": NO_KERNELS,
}
"""Reason why a flag with a value is ignored, by flag."""
BUILD_SWITCHES = dict.fromkeys(
    ("gather_context_logits", "gather_generation_logits", "gather_all_token_logits"),
    "requests can ask for logits, up to --max-logits-size",
)
"""Reason why a flag without a value is ignored, by flag."""


def convert_checkpoint() -> int:
    """Run ``convert_checkpoint.py``; returns the exit status."""
    parser = _parser("convert_checkpoint.py", "Record the checkpoint to serve and its data type.")
    parser.add_argument("--model_dir", type=Path, required=True, help="folder of a Hugging Face checkpoint")
    _add_common(parser)
    return _run(parser, partial(_record, quant_algo=None, kv_cache_quant_algo=None))


def quantize() -> int:
    """Run ``quantize.py``; returns the exit status."""
    parser = _parser("quantize.py", "Quantize a checkpoint, or record its quantization at load.")
    parser.add_argument("--model_dir", type=Path, required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--qformat", default="full_prec", help=f"one of {', '.join(ALGORITHMS)} (default: full_prec)")
    parser.add_argument("--kv_cache_dtype", help="data type of the KV cache: int8 or fp8 (default: the model's)")
    parser.add_argument("--calib_size", type=int, help="number of calibration samples (default: 512)")
    parser.add_argument("--calib_dataset", help="file or folder of calibration texts (default: built-in texts)")
    parser.add_argument("--calib_max_seq_length", type=int, help="maximum tokens of a sample (default: 512)")
    parser.add_argument("--awq_block_size", type=int, help="group size of 4-bit weights (default: 128)")
    parser.add_argument("--batch_size", help="ignored: samples are batched automatically")
    _add_common(parser)
    return _run(parser, _quantize)


def build() -> int:
    """Run ``trtllm-build``, which writes a folder for ``engine_dir`` of a model repository; returns the exit status."""
    parser = _parser("trtllm-build", "Pack a checkpoint's weights, and record the limits of the server.")
    about = "output folder of convert_checkpoint.py or quantize.py"
    parser.add_argument("--checkpoint_dir", type=Path, required=True, help=about)
    parser.add_argument("--output_dir", type=Path, required=True, help="new engine folder")
    parser.add_argument("--workers", type=int, default=1, help="number of processes that pack ranks (default: 1)")
    for name in BUILD_LIMITS:
        parser.add_argument(f"--{name}", type=int, help=f"{name.replace('_', ' ')} of the server")
    for name, about in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"number of {about}; must equal the checkpoint's")
    parser.add_argument("--paged_kv_cache", default="enable", help=f"must be enable: {ALWAYS_PAGED}")
    for name, why in BUILD_IGNORED.items():
        parser.add_argument(f"--{name}", help=f"ignored: {why}")
    for name, why in BUILD_SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", default=None, help=f"ignored: {why}")
    return _run(parser, _build)


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=name, description=about, allow_abbrev=False)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output_dir", type=Path, required=True, help="output folder for config.json")
    parser.add_argument(
        "--dtype", default="auto", help=f"data type of the computation: {', '.join(DTYPES)} (default: auto)"
    )
    for name, about in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=1, help=f"number of {about} (default: 1)")


def _run(parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], str]) -> int:
    args, unknown = parser.parse_known_args()

    def checked() -> None:
        if unknown:
            name = unknown[0].partition("=")[0]
            raise invalid(name, f"unknown argument{did_you_mean(name, parser._option_string_actions)}")
        print(f"{parser.prog}: {work(args)}")

    return exit_status(parser, checked)


def _quantize(args: argparse.Namespace) -> str:
    if args.qformat not in ALGORITHMS:
        hint = did_you_mean(args.qformat, ALGORITHMS)
        raise invalid("--qformat", f"{args.qformat!r} is not supported, only {', '.join(ALGORITHMS)}{hint}")
    if args.kv_cache_dtype not in CACHES:
        raise invalid("--kv_cache_dtype", f"{args.kv_cache_dtype!r} is not supported, only int8 and fp8")
    if args.kv_cache_dtype == "fp8":
        print("--kv_cache_dtype fp8: on CPUs, the KV cache is quantized to int8", file=sys.stderr)
    if args.batch_size is not None:
        _print_ignored("batch_size", "samples are computed in batches of a few thousand tokens")
    if args.qformat not in METHODS:
        for name in CALIBRATION:
            if getattr(args, name) is not None:
                _print_ignored(name, "weights are rounded to nearest, without calibration")
        return _record(args, ALGORITHMS[args.qformat], CACHES[args.kv_cache_dtype])
    _check_common(args)
    if args.calib_dataset and not Path(args.calib_dataset).exists():
        raise invalid("--calib_dataset", f"{args.calib_dataset} does not exist: give a file or folder of texts")
    engine_folder.pretrained_config(args.model_dir, args.dtype, None, None)  # raises an error without a checkpoint
    engine_folder.check(args.output_dir, engine_folder.QUANTIZED)
    given = {setting: value for name, setting in CALIBRATION.items() if (value := getattr(args, name)) is not None}
    checkpoint = args.output_dir / engine_folder.QUANTIZED
    write_quantized(args.model_dir, checkpoint, QuantizeOptions(METHODS[args.qformat], **given))
    args.model_dir = checkpoint
    _record(args, ALGORITHMS[args.qformat], CACHES[args.kv_cache_dtype], engine_folder.QUANTIZED)
    return f"{args.output_dir} has the quantized checkpoint"


def _check_common(args: argparse.Namespace) -> None:
    if args.dtype not in DTYPES:
        raise invalid("--dtype", f"{args.dtype!r} is not one of {', '.join(DTYPES)}")
    for name in SIZES:
        _check_at_least_one(name, getattr(args, name))


def _record(
    args: argparse.Namespace, quant_algo: str | None, kv_cache_quant_algo: str | None, allowed: str = ""
) -> str:
    _check_common(args)
    config = engine_folder.pretrained_config(
        args.model_dir, args.dtype, quant_algo, kv_cache_quant_algo, args.tp_size, args.pp_size
    )
    engine_folder.write(args.output_dir, config, allowed)
    quantization = engine_folder.QUANTIZATION[quant_algo]
    load = "loaded unmodified" if quantization == "none" else f"quantized to {quantization} at load"
    return f"{args.output_dir} refers to the checkpoint {args.model_dir}, which will be {load}: nothing is converted"


def _build(args: argparse.Namespace) -> str:
    result = engine_folder.converted(args.checkpoint_dir)
    limits = {name: getattr(args, name) for name in BUILD_LIMITS}
    for name, limit in limits.items():
        if limit is not None:
            _check_at_least_one(name, limit)
    for name in SIZES:
        given_size, size = getattr(args, name), result["mapping"][name]
        if given_size not in (None, size):
            raise invalid(f"--{name}", f"is {given_size}, but the checkpoint was converted for {size}", size)
    if args.paged_kv_cache != "enable":
        raise invalid("--paged_kv_cache", f"must be enable, is {args.paged_kv_cache!r}: {ALWAYS_PAGED}")
    given = {name: getattr(args, name) for name in (*BUILD_IGNORED, *BUILD_SWITCHES)}
    for name, why in (BUILD_IGNORED | BUILD_SWITCHES).items():
        if given[name] is not None:
            _print_ignored(name, why)
    plugins = {name: value for name, value in given.items() if value is not None}
    _check_at_least_one("workers", args.workers)
    notes = {"about": ABOUT_ENGINE, "pretrained_config": result, "build_config": {**limits, "plugin_config": plugins}}
    settings = engine_folder.checkpoint_settings(result) | engine_folder.limits_of(limits)
    recorded = {name: value for name, value in settings.items() if name in RECORDED and value != "auto"}
    options = engine_options(settings, "the command or its checkpoint_dir")
    built = build_folder(options, args.output_dir, recorded=recorded, notes=notes, workers=args.workers)
    return f"{args.output_dir}: {describe(built)}"


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise invalid(f"--{name}", f"must be at least 1, is {value}", 1)


def _print_ignored(name: str, why: str) -> None:
    print(f"--{name} is ignored: {why}", file=sys.stderr)


COMMANDS = {"convert_checkpoint.py": convert_checkpoint, "quantize.py": quantize, "trtllm-build": build}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv.pop(1)]())
