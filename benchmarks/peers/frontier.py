"""Speed against quality of each format of Penstock and its peers on one real model, alternating.

python benchmarks/peers/frontier.py CHECKPOINT --openvino PYTHON --llama-cpp FOLDER --ik-llama-cpp FOLDER

The checkpoint needs real weights, since random weights have no quality to measure. Peers are given as in
``benchmarks/peers``; ik_llama.cpp is built like llama.cpp. Each system computes the perplexity of the second halves of
windows of 512 tokens of a text, as ``llama-perplexity`` does; it is reported relative to the 16-bit perplexity of the
same system, so that differences in tokenizers do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from drawing import OURS, draw_frontier
from systems import (
    WORKS,
    System,
    Work,
    convert,
    convert_llama_cpp,
    export_openvino,
    machine,
    quantize_llama_cpp,
    rate,
    running,
)
from tqdm import tqdm

HERE = Path(__file__).parent
MEASURED: list[Work] = [(1, 512, 1), (1, 16, 64), (8, 16, 64)]
"""Measured works: prefill of 512 tokens, decode of 1 and of 8 sequences."""
OURS_FORMATS = ("none", "wint8", "w8a8", "wint4", "w4a8")
OURS_GGUF = {"q8_0": "w8a8", "q6_k": "w8a8", "q4_k_m": "none", "q4_0": "w4a8"}
"""``--quantization`` of Penstock by type of llama.cpp's GGUF file."""
LLAMA_TYPES = ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q4_0", "q3_k_m", "q2_k")
IK_TYPES = ("bf16", "q8_0", "q6_k", "q4_k_m", "iq4_k", "iq4_ks", "q4_0")
OPENVINO_WEIGHTS = {
    "fp16": ["fp16"],
    "int8": ["int8"],
    "int4-g64": ["int4", "--group-size", "64"],
    "int4-g32": ["int4", "--group-size", "32", "--ratio", "1.0"],
}
"""Arguments after ``--weight-format``. Groups of 128, the default for ``int4``, do not divide every model's inputs."""
FORMATS_16_BIT = ("none", "bf16", "fp16")
"""16-bit formats: their perplexity is the reference for the other formats of a system."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--openvino", type=Path, metavar="PYTHON")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--ik-llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM:FORMAT", help="only these formats, such as Penstock:w8a8")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path("/usr/share/common-licenses/GPL-3"),
        help="text for perplexity (default: GPL 3)",
    )
    parser.add_argument("--windows", type=int, default=14, help="number of windows of 512 tokens (default: 14)")
    parser.add_argument("--work", type=Path, default=Path("build/frontier"), help="folder for converted checkpoints")
    parser.add_argument("--threads", type=int, default=2, help="number of threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds (default: 2)")
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--picture", type=Path, help="draw results to this file (.png or .svg)")
    args = parser.parse_args()

    systems = [system for system in found(args) if not args.only or label(system) in args.only]
    seconds: dict[str, dict[Work, list[float]]] = {label(each): {work: [] for work in MEASURED} for each in systems}
    perplexities: dict[str, float] = {}
    for turn in range(args.rounds):
        for system in tqdm(systems, desc=f"round {turn + 1}", unit="format"):
            try:
                with running(system) as started:
                    for work in MEASURED:
                        seconds[label(system)][work] += [started.seconds(work) for _ in range(3)]
                    if not turn:
                        perplexities[label(system)] = started.perplexity(args.text.resolve(), args.windows)
            except SystemExit as error:  # continue with the other systems
                print(error, file=sys.stderr)
    seconds = {name: seconds[name] for name in perplexities if all(seconds[name].values())}
    losses = {name: value / perplexities[reference(name, perplexities)] for name, value in perplexities.items()}
    rates = {name: {work: rate(work, taken) for work, taken in own.items()} for name, own in seconds.items()}
    if args.json:
        by_name = {name: {WORKS[work]: taken for work, taken in own.items()} for name, own in seconds.items()}
        results = {"machine": machine(), "perplexities": perplexities, "seconds": by_name}
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.picture:
        draw_frontier(
            args.picture, losses, {WORKS[work]: {n: own[work] for n, own in rates.items()} for work in MEASURED}
        )
    print(f"{machine()}, {args.threads} threads, {args.rounds} rounds\n")
    print(table(losses, perplexities, rates, seconds))


def label(system: System) -> str:
    return f"{system.name}:{system.format}"


def reference(name: str, measured: dict[str, float]) -> str:
    """The 16-bit format of the same system, or its best format if no 16-bit format was measured."""
    same_system = [each for each in measured if each.split(":")[0] == name.split(":")[0]]
    in_16_bits = [each for each in same_system if each.split(":")[1] in FORMATS_16_BIT]
    return in_16_bits[0] if in_16_bits else min(same_system, key=lambda each: measured[each])


def found(args: argparse.Namespace) -> Iterator[System]:
    """Systems to compare, in all their formats; checkpoints are converted if needed."""
    threads = str(args.threads)
    for format in OURS_FORMATS:
        yield ours(format, args.checkpoint, threads, format)
    if args.openvino:
        for format, weights in OPENVINO_WEIGHTS.items():
            folder = args.work / f"openvino-{format}"
            convert(folder, lambda w=weights, to=folder: export_openvino(args.openvino, args.checkpoint, w, to))
            command = [str(args.openvino), str(HERE / "run_openvino.py"), str(folder), threads]
            yield System("OpenVINO", format, command, {})
    for name, source, types in (
        ("llama.cpp", args.llama_cpp, LLAMA_TYPES),
        ("ik_llama.cpp", args.ik_llama_cpp, IK_TYPES),
    ):
        if source:
            file = args.work / f"{name}-bf16.gguf"
            converter = args.llama_cpp or source
            convert(file, lambda to=file, using=converter: convert_llama_cpp(using, args.checkpoint, to))
            yield from gguf_systems(name, source, file, types, threads)


def ours(name: str, checkpoint: Path, threads: str, quantization: str) -> System:
    return System(
        OURS, name, [sys.executable, str(HERE / "run_penstock.py"), str(checkpoint), threads, quantization], {}
    )


def gguf_systems(name: str, source: Path, whole: Path, types: tuple[str, ...], threads: str) -> Iterator[System]:
    """llama.cpp or a fork with each type of GGUF file, and Penstock with llama.cpp's files."""
    for type in types:
        file = whole.with_name(f"{name}-{type}.gguf")
        convert(file, lambda to=file, type=type: quantize_llama_cpp(source, whole, to, type))
        yield System(name, type, [sys.executable, str(HERE / "run_llama_cpp.py"), str(source), str(file), threads], {})
        if name == "llama.cpp" and type in OURS_GGUF:
            yield ours(f"{type}-gguf", file, threads, OURS_GGUF[type])


def table(
    losses: dict[str, float],
    perplexities: dict[str, float],
    rates: dict[str, dict[Work, float]],
    seconds: dict[str, dict[Work, list[float]]],
) -> str:
    """Table with a row per format, best quality first, and the range of speeds over the rounds."""
    lines = ["| | format | perplexity | × 16 bits | " + " | ".join(f"{WORKS[w]}, tokens/s" for w in MEASURED) + " |"]
    lines.append("|---|---|---:|---:|" + "---:|" * len(MEASURED))
    for name in sorted(losses, key=lambda each: losses[each]):
        system, format = name.split(":")
        speeds = []
        for work in MEASURED:
            turns = [rate(work, [taken]) for taken in seconds[name][work]]
            speeds.append(f"{rates[name][work]:,.0f} ({min(turns):,.0f}–{max(turns):,.0f})")
        cells = [system, f"`{format}`", f"{perplexities[name]:.3f}", f"{losses[name]:.3f}", *speeds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
