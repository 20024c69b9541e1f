"""Speed against quality: each format of Penstock and its peers on one real model, in turns.

python benchmarks/peers/frontier.py CHECKPOINT --openvino PYTHON --llama-cpp FOLDER --ik-llama-cpp FOLDER

The checkpoint has real weights: random ones have no quality to lose. Peers are given as in ``benchmarks/peers``; the
folder of ik_llama.cpp is built alike. Perplexity is that of the second halves of windows of 512 tokens of a text, as
``llama-perplexity`` measures it, in each system's own computation; it is quoted as a multiple of the system's own
16-bit perplexity, so that differences in tokenizers do not count. Bytes are those of the file or the loaded weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from drawing import OURS, draw_frontier
from isa import hold_openvino
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
"""Prefill 512, decode 1 and decode 8."""
OURS_FORMATS = ("none", "wint8", "w8a8", "wint4", "w4a8")
OURS_GGUF = {"q8_0": "w8a8", "q6_k": "w8a8", "q4_k_m": "none", "q4_0": "w4a8"}
"""``--quantization`` of Penstock over llama.cpp's files of these types."""
LLAMA_TYPES = ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q4_0", "q3_k_m", "q2_k")
IK_TYPES = ("bf16", "q8_0", "q6_k", "q4_k_m", "iq4_k", "iq4_ks", "q4_0")
OPENVINO_WEIGHTS = {
    "fp16": ["fp16"],
    "int8": ["int8"],
    "int4-g64": ["int4", "--group-size", "64"],
    "int4-g32": ["int4", "--group-size", "32", "--ratio", "1.0"],
}
"""Arguments after ``--weight-format``. Groups of 128, the default for ``int4``, do not divide every model's inputs."""
WHOLE = ("none", "bf16", "fp16")
"""Formats in 16 bits, to which a system's other perplexities are related."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--openvino", type=Path, metavar="PYTHON")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--ik-llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM:FORMAT", help="measure these alone, such as Penstock:w8a8")
    parser.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"), help="(default: GPL 3)")
    parser.add_argument("--windows", type=int, default=14, help="of 512 tokens (default: 14)")
    parser.add_argument("--work", type=Path, default=Path("build/frontier"), help="converted checkpoints")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="turns that each system takes in each work (default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw them here (.png or .svg)")
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
            except SystemExit as error:  # others are measured all the same
                print(error, file=sys.stderr)
    seconds = {name: seconds[name] for name in perplexities if all(seconds[name].values())}
    losses = {name: perplexity / perplexities[whole(name, perplexities)] for name, perplexity in perplexities.items()}
    rates = {name: {work: rate(work, taken) for work, taken in own.items()} for name, own in seconds.items()}
    if args.json:
        kept = {name: {WORKS[work]: taken for work, taken in own.items()} for name, own in seconds.items()}
        told = {"machine": machine(), "perplexities": perplexities, "seconds": kept}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    if args.picture:
        draw_frontier(
            args.picture, losses, {WORKS[work]: {n: own[work] for n, own in rates.items()} for work in MEASURED}
        )
    print(f"{machine()}, {args.threads} threads, {args.rounds} rounds\n")
    print(table(losses, perplexities, rates, seconds))


def label(system: System) -> str:
    return f"{system.name}:{system.format}"


def whole(name: str, measured: dict[str, float]) -> str:
    """The 16-bit format of the same system, or the system's best where that was not measured."""
    own = [each for each in measured if each.split(":")[0] == name.split(":")[0]]
    in_16_bits = [each for each in own if each.split(":")[1] in WHOLE]
    return in_16_bits[0] if in_16_bits else min(own, key=lambda each: measured[each])


def found(args: argparse.Namespace) -> Iterator[System]:
    """The systems to compare, in each of their formats, with checkpoints converted where needed."""
    threads = str(args.threads)
    for format in OURS_FORMATS:
        yield ours(format, args.checkpoint, threads, format)
    if args.openvino:
        held = hold_openvino(None, args.work)
        for format, weights in OPENVINO_WEIGHTS.items():
            folder = args.work / f"openvino-{format}"
            convert(folder, lambda w=weights, to=folder: export_openvino(args.openvino, args.checkpoint, w, to))
            yield System(
                "OpenVINO", format, [str(args.openvino), str(HERE / "run_openvino.py"), str(folder), threads], held
            )
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
    """A program that reads GGUF files, with each type of file."""
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
    """A line for each format, best quality first; speeds with the range of their turns."""
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
