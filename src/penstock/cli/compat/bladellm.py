"""BladeLLM's offline tools: ``blade_llm_quantize`` and ``blade_llm_split``.

Rounding to nearest (``minmax``) happens when weights are loaded: ``blade_llm_quantize`` then writes a folder for
``--model`` with links to the checkpoint, and a ``config.json`` that names the quantization. Other algorithms and FP8
write a checkpoint like ``penstock quantize``. ``blade_llm_split`` writes an engine folder (``penstock build``) with
packed weights of each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import msgspec

from penstock.calibration.options import QuantizeOptions
from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.stored_format import QUANT_METHOD, quantization_config_of, quantization_of
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..build_folder import build, describe, engine_options
from ..parser import Parser, exit_status
from ..quantize import write_quantized

CONFIG = "config.json"
MODES = ("weight_only_quant", "act_and_weight_quant")
FORMATS = {
    ("weight_only_quant", 8, "false"): "wint8",
    ("weight_only_quant", 4, "false"): "wint4",
    ("weight_only_quant", 4, "true"): "wint4-g32",
    ("act_and_weight_quant", 8, "false"): "w8a8",
}
"""``quantization`` by mode, bits and block-wise scales."""
ALGORITHMS = ("minmax", "gptq", "awq", "smoothquant")
METHODS: dict[tuple[str, str, int, str], QuantizeOptions] = {
    ("gptq", MODES[0], 4, "false"): QuantizeOptions("gptq"),
    ("gptq", MODES[0], 4, "true"): QuantizeOptions("gptq", group_size=32),
    ("gptq", MODES[0], 8, "false"): QuantizeOptions("gptq", bits=8, group_size=-1),
    ("awq", MODES[0], 4, "false"): QuantizeOptions("awq"),
    ("awq", MODES[0], 4, "true"): QuantizeOptions("awq", group_size=32),
    ("smoothquant", MODES[1], 8, "false"): QuantizeOptions("smoothquant"),
    ("fp8", MODES[1], 8, "false"): QuantizeOptions("fp8"),
}
"""Options of ``penstock quantize`` by algorithm (or ``fp8``), mode, bits and block-wise scales."""
UNUSED = {
    "calib_data": "minmax uses no calibration data",
    "calib_data_file": "minmax uses no calibration data",
    "cpu_offload": "no GPU is needed",
}


def quantize() -> int:
    """Quantize a checkpoint, or link it for quantization at load; returns the exit status."""
    parser = _parser("blade_llm_quantize", "Quantize a checkpoint, or prepare its quantization at load (minmax).")
    parser.add_argument("--bit", type=int, choices=(8, 4), default=8, help="bits per weight (default: 8)")
    parser.add_argument(
        "--quant_mode",
        choices=MODES,
        default=MODES[0],
        help="quantize weights only, or activations, too (default: weight_only_quant)",
    )
    parser.add_argument("--quant_dtype", default="int", choices=("int", "fp8"), help="type of weights (default: int)")
    parser.add_argument(
        "--quant_algo", default="minmax", choices=ALGORITHMS, help="method (default: minmax, which rounds at load)"
    )
    parser.add_argument(
        "--block_wise_quant",
        nargs="?",
        const="true",
        default="false",
        help="one scale per block of inputs instead of one per output",
    )
    parser.add_argument("--calib_data", nargs="*", help="calibration texts (default: built-in texts)")
    parser.add_argument("--calib_data_file", help="file of calibration texts")
    parser.add_argument("--cpu_offload", nargs="?", const="true", help="ignored: no GPU is needed")
    return exit_status(parser, lambda: _quantize(parser.parse_args()))


def split() -> int:
    """Pack a checkpoint's weights for each rank into an engine folder; returns the exit status."""
    parser = _parser("blade_llm_split", "Pack a checkpoint's weights for each rank into an engine folder.")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="number of ranks (default: 1)")
    return exit_status(parser, lambda: _split(parser.parse_args()))


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = Parser(prog=name, description=about, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or its name on the hub")
    parser.add_argument("--output_dir", required=True, type=Path, help="output folder, for --model of blade_llm_server")
    return parser


def _quantize(args: argparse.Namespace) -> None:
    """Run ``blade_llm_quantize``. Raises ``PenstockError``: ``unsupported`` for unsupported formats, ``invalid`` for
    invalid folders."""
    if args.quant_algo != "minmax" or args.quant_dtype == "fp8":
        return _write_quantized(args)
    kind = (args.quant_mode, args.bit, args.block_wise_quant.lower())
    if kind not in FORMATS:
        known = "; ".join(f"{mode} with --bit {bit}" for mode, bit, blocks in FORMATS if blocks == "false")
        combination = f"{args.quant_mode} with --bit {args.bit} and --block_wise_quant {args.block_wise_quant}"
        raise _unsupported("quant_mode", combination, f"use {known}; block-wise scales with 4-bit weights only")
    for name, why in UNUSED.items():
        if getattr(args, name) is not None:
            print(f"--{name} is ignored: {why}", file=sys.stderr)
    _link_checkpoint(args, FORMATS[kind])
    print(f"{args.output_dir}: weights will be quantized to {FORMATS[kind]} at load")


def _write_quantized(args: argparse.Namespace) -> None:
    algorithm = "fp8" if args.quant_dtype == "fp8" else args.quant_algo
    kind = (algorithm, args.quant_mode, args.bit, args.block_wise_quant.lower())
    if kind not in METHODS or (algorithm == "fp8" and args.quant_algo != "minmax"):
        given = f"{args.quant_mode}, --bit {args.bit}, --block_wise_quant {args.block_wise_quant}"
        known = dict.fromkeys(f"{mode} with --bit {bit}" for name, mode, bit, _ in METHODS if name == algorithm)
        message = f"{args.quant_algo} for {args.quant_dtype} with {given}"
        raise _unsupported("quant_algo", message, f"{algorithm} supports {'; '.join(known)}")
    if args.cpu_offload is not None:
        print(f"--cpu_offload is ignored: {UNUSED['cpu_offload']}", file=sys.stderr)
    texts, file = tuple(args.calib_data or ()), args.calib_data_file or ""
    if texts and file:
        raise invalid("calib_data", "cannot be combined with calib_data_file: omit one of them")
    write_quantized(
        args.model, args.output_dir, msgspec.structs.replace(METHODS[kind], calib_texts=texts, calib_dataset=file)
    )


def _split(args: argparse.Namespace) -> None:
    from penstock.frontend.hub import resolve

    options = {"model": str(resolve(args.model)), "tensor_parallel_size": args.tensor_parallel_size}
    built = build(engine_options(options, "the command"), args.output_dir)
    print(f"{args.output_dir}: {describe(built)}")


def _link_checkpoint(args: argparse.Namespace, quantization: str) -> None:
    """Create links to a checkpoint's files, and a configuration that names the quantization."""
    from penstock.frontend.hub import resolve

    model, output = resolve(args.model).resolve(), args.output_dir.resolve()
    if not (model / CONFIG).is_file():
        raise invalid("model", f"{model} has no {CONFIG}: give the folder of a Hugging Face checkpoint")
    if model == output:
        raise invalid("output_dir", f"{output} is the folder of the model: give another folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for file in model.iterdir():
            place = output / file.name
            if file.name == CONFIG:
                _configure(file, place, quantization)
            elif not place.is_symlink() and not place.exists():
                place.symlink_to(file)
            elif not place.is_symlink() or Path(os.readlink(place)) != file:
                raise invalid("output_dir", f"{place} already exists: give an empty folder")
    except OSError as error:
        raise invalid("output_dir", f"cannot write to {output}: {error.strerror}") from error


def _configure(file: Path, place: Path, quantization: str) -> None:
    if place.is_symlink() or (place.exists() and not quantization_of(json.loads(place.read_text(encoding="utf-8")))):
        raise invalid("output_dir", f"{place} already exists: give an empty folder")
    config = json.loads(file.read_text(encoding="utf-8"))
    if quantization_config_of(read_config_json(file.parent)):
        raise invalid("model", f"{file.parent} is already quantized: give the original checkpoint")
    config["quantization_config"] = {"quant_method": QUANT_METHOD, "format": quantization}
    place.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _unsupported(name: str, value: str, instead: str) -> PenstockError:
    return PenstockError(Code.UNSUPPORTED, f"--{name}: {value} is not supported; {instead}", name)


COMMANDS = {"blade_llm_quantize": quantize, "blade_llm_split": split}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv.pop(1)]())
