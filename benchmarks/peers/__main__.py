"""Speed of Penstock and its peers (OpenVINO, vLLM, llama.cpp) on the same checkpoint, alternating, compared with the
machine's limits.

python benchmarks/peers CHECKPOINT --openvino PYTHON --vllm PYTHON --llama-cpp FOLDER

Every peer is optional and has a separate environment: give the ``python`` with ``openvino-genai`` and
``optimum-intel``, the ``python`` with ``vllm``, and the source folder of llama.cpp with programs in ``build/bin``.
Checkpoints are converted once, into ``--work``. Penstock is also measured with llama.cpp's 8-bit and 4-bit GGUF files.
All systems decode greedily, ignore EOS and have no prefix cache.

``--isa`` limits every system to an instruction set: Penstock with ``PENSTOCK_ISA``, OpenVINO with
``ONEDNN_MAX_CPU_ISA`` and a small library that overrides its CPU detection (this needs a C++ compiler). llama.cpp is
limited at compile time, so its folder must contain a build for that set; other builds are rejected. For avx2:
``-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON``. vLLM cannot be limited.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from drawing import OURS, WITH_PEERS_FILE, draw
from isa import ONEDNN, check_llama_cpp, limit_openvino
from systems import (
    NAMES,
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
    turns_of,
)
from tqdm import tqdm

HERE = Path(__file__).parent
OPENVINO_WEIGHTS = {
    "bf16": ["fp16"],
    "int8": ["int8"],
    "int4": ["int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
}
"""Arguments after ``--weight-format`` of ``optimum-cli``, by format."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--openvino", type=Path, metavar="PYTHON")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--work", type=Path, default=Path("build/peers"), help="folder for converted checkpoints (default: build/peers)"
    )
    parser.add_argument("--format", nargs="+", choices=["bf16", "int8", "int4"], default=["bf16", "int8", "int4"])
    parser.add_argument("--works", nargs="+", choices=NAMES, default=list(NAMES), help="work to measure (default: all)")
    parser.add_argument("--isa", choices=ONEDNN, help="limit all systems to this instruction set")
    parser.add_argument("--threads", type=int, default=2, help="number of threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds; short works run three times each (default: 2)")
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--picture", type=Path, help="draw results to this file (.png or .svg)")
    args = parser.parse_args()
    if args.isa and args.vllm:
        parser.error("vLLM cannot be limited to an instruction set: omit --vllm or --isa")
    if args.isa and args.llama_cpp and (problem := check_llama_cpp(args.llama_cpp, args.isa)):
        parser.error(problem)

    works = [NAMES[name] for name in args.works]
    systems = list(found(args))
    seconds: dict[str, dict[Work, list[float]]] = {}
    limits = []
    for format in args.format:
        with ExitStack() as stack:
            started = {s.name: stack.enter_context(running(s)) for s in systems if s.format == format}
            for turn in range(args.rounds):
                limits.append(measure_limits(args.threads, args.isa))
                for work in tqdm(works, desc=f"{format}, round {turn + 1}", unit="work"):
                    for name, system in list(started.items()) * turns_of(work):
                        measured = seconds.setdefault(f"{name} {format}", {each: [] for each in works})
                        measured[work].append(system.seconds(work))
                save(args.json, args.isa, limits, seconds)
    best = {name: max(one[name] for one in limits) for name in limits[0]}
    rates = {name: {work: rate(work, taken) for work, taken in own.items()} for name, own in seconds.items()}
    if args.picture:
        draw(args.picture, {name: {WORKS[w]: r for w, r in own.items()} for name, own in rates.items()}, args.format)
    isa = f", limited to {args.isa}" if args.isa else ""
    print(f"{machine()}{isa}, {args.threads} threads, {args.rounds} rounds\n")
    print(table(rates, seconds, best, args.format))


def save(
    path: Path | None, isa: str | None, limits: list[dict[str, float]], seconds: dict[str, dict[Work, list[float]]]
) -> None:
    """Write the results so far, since a peer may fail after an hour."""
    if path:
        by_name = {name: {WORKS[w]: taken for w, taken in own.items()} for name, own in seconds.items()}
        results = {"machine": machine(), "isa": isa, "limits": limits, "seconds": by_name}
        path.write_text(json.dumps(results, indent=1) + "\n")


def found(args: argparse.Namespace) -> Iterator[System]:
    """Systems to compare; checkpoints are converted if needed."""
    environment = penstock_environment(args.isa)
    ours = [sys.executable, str(HERE / "run_penstock.py"), str(args.checkpoint), str(args.threads)]
    for format, quantization in {"bf16": "none", "int8": "w8a8", "int4": "w4a8"}.items():
        yield System(OURS, format, [*ours, quantization], environment)
    if args.openvino:
        limited = limit_openvino(args.isa, args.work)
        for format in ("bf16", "int8", "int4"):
            folder = args.work / f"openvino-{format}"
            weights = OPENVINO_WEIGHTS[format]
            convert(folder, lambda w=weights, to=folder: export_openvino(args.openvino, args.checkpoint, w, to))
            runner = [str(args.openvino), str(HERE / "run_openvino.py")]
            yield System("OpenVINO", format, [*runner, str(folder), str(args.threads)], limited)
    if args.vllm:
        runner = [str(args.vllm), str(HERE / "run_vllm.py")]
        yield System("vLLM", "bf16", [*runner, str(args.checkpoint), str(args.threads)], {})
    if args.llama_cpp:
        whole = args.work / "llama-bf16.gguf"
        convert(whole, lambda: convert_llama_cpp(args.llama_cpp, args.checkpoint, whole))
        for format, kind in {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}.items():
            file = args.work / f"llama-{kind}.gguf"
            convert(file, lambda to=file, type=kind: quantize_llama_cpp(args.llama_cpp, whole, to, type))
            runner = [sys.executable, str(HERE / "run_llama_cpp.py")]
            yield System("llama.cpp", format, [*runner, str(args.llama_cpp), str(file), str(args.threads)], {})
            if format != "bf16":  # Penstock quantizes activations to 8 bits, as llama.cpp does
                quantization = "w8a8" if format == "int8" else "w4a8"
                runner = [sys.executable, str(HERE / "run_penstock.py")]
                command = [*runner, str(file), str(args.threads), quantization]
                yield System(WITH_PEERS_FILE, format, command, environment)


def penstock_environment(isa: str | None) -> dict[str, str]:
    return {"PENSTOCK_ISA": isa} if isa else {}


def measure_limits(threads: int, isa: str | None) -> dict[str, float]:
    """Measure the machine's limits in a separate process, like the systems."""
    script = f"import json; from penstock.ops import cpu; cpu.set_threads({threads}); limits = cpu.measure_limits()"
    script += "; print(json.dumps(vars(limits)))"
    environment = os.environ | penstock_environment(isa)
    ran = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(ran.stdout)
    return result


def table(
    rates: dict[str, dict[Work, float]],
    seconds: dict[str, dict[Work, list[float]]],
    limits: dict[str, float],
    formats: list[str],
) -> str:
    """Markdown tables of the rates of all systems, and of the median over the rounds of Penstock's rate divided by the
    fastest peer's. Penstock with a peer's file is a column, but does not count as a peer."""
    lines = [
        f"Limits: memory reads {limits['read'] / 1e9:.0f} GB/s; multiply-adds of bfloat16 "
        f"{limits['bfloat16'] / 1e9:.0f} G/s, of 8-bit integers {limits['int8'] / 1e9:.0f} G/s.",
    ]
    for format in formats:
        own = {name.rsplit(" ", 1)[0]: r for name, r in rates.items() if name.endswith(f" {format}")}
        others = [name for name in own if name != OURS]
        peers = [name for name in others if name != WITH_PEERS_FILE]
        head = ["tokens/s", OURS, *others, *(["ratio to the best"] if peers else [])]
        lines += ["", f"**{format}**", "", row(head), row(["---", *["---:"] * (len(head) - 1)])]
        for work in own[OURS]:
            turns = zip(*(seconds[f"{name} {format}"][work] for name in (OURS, *peers)), strict=True)
            ratio = [f"{statistics.median(min(theirs) / ours for ours, *theirs in turns):.2f}"] if peers else []
            figures = (own[name][work] for name in (OURS, *others))
            lines.append(row([WORKS[work], *(f"{figure:.{figure < 20:d}f}" for figure in figures), *ratio]))
    return "\n".join(lines)


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
