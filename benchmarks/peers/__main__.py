"""Penstock and the systems a user would pick instead, on the same checkpoint, in turns, beside the machine's limits.

python benchmarks/peers CHECKPOINT --openvino PYTHON --vllm PYTHON --llama-cpp FOLDER

Each peer is optional and lives in an environment of its own: give the ``python`` that has ``openvino-genai`` and
``optimum-intel``, the one that has ``vllm``, the folder of llama.cpp's source with its programs built in ``build/bin``.
Checkpoints are converted once, into ``--work``. All generate greedily, ignore the end of text and share no prefixes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drawing import draw
from tqdm import tqdm

HERE = Path(__file__).parent
Work = tuple[int, int, int]
"""Prompts, tokens of each, tokens to generate for each."""
WORKS: dict[Work, str] = {
    (1, 512, 1): "prefill 512",
    (1, 2048, 1): "prefill 2,048",
    (1, 16, 64): "decode, 1",
    (8, 16, 64): "decode, 8",
    (32, 16, 64): "decode, 32",
    (16, 512, 64): "16 × (512 → 64)",
}


@dataclass(frozen=True)
class System:
    """Something that runs all works in a format when it is called, and prints the seconds of each."""

    name: str
    format: str
    """``bf16``, ``int8`` or ``int4``: what stands beside each other."""
    command: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--openvino", type=Path, metavar="PYTHON")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="converted checkpoints (build/peers)")
    parser.add_argument("--format", nargs="+", choices=["bf16", "int8", "int4"], default=["bf16", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="turns each system takes (default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw them here (.png or .svg)")
    args = parser.parse_args()

    systems = [system for system in found(args) if system.format in args.format]
    seconds: dict[str, dict[Work, list[float]]] = {}
    limits = []
    for turn in range(args.rounds):
        limits.append(measure_limits(args.threads))
        for system in tqdm(systems, desc=f"round {turn + 1}", unit="system"):
            own = seconds.setdefault(f"{system.name} {system.format}", {work: [] for work in WORKS})
            for work, taken in run(system):
                own[work].append(taken)
    best = {name: max(one[name] for one in limits) for name in limits[0]}
    rates = {name: {work: rate(work, taken) for work, taken in own.items() if taken} for name, own in seconds.items()}
    if args.json:
        kept = {name: {WORKS[w]: taken for w, taken in own.items()} for name, own in seconds.items()}
        args.json.write_text(json.dumps({"machine": machine(), "limits": limits, "seconds": kept}, indent=1) + "\n")
    if args.picture:
        draw(args.picture, {name: {WORKS[w]: r for w, r in own.items()} for name, own in rates.items()}, args.format)
    print(f"{machine()}, {args.threads} threads, {args.rounds} rounds\n")
    print(table(rates, best, args.format))


def found(args: argparse.Namespace) -> Iterator[System]:
    """What there is to run, converted where it must be."""
    works = json.dumps(list(WORKS))
    ours = [sys.executable, str(HERE / "run_penstock.py"), str(args.checkpoint), str(args.threads), works]
    for format, quantization in {"bf16": "none", "int8": "w8a8", "int4": "w4a8"}.items():
        yield System("Penstock", format, [*ours, quantization])
    if args.openvino:
        for format in ("bf16", "int8", "int4"):
            folder = args.work / f"openvino-{format}"
            convert(folder, lambda f=format, to=folder: export_openvino(args, f, to))
            runner = [str(args.openvino), str(HERE / "run_openvino.py")]
            yield System("OpenVINO", format, [*runner, str(folder), str(args.threads), works])
    if args.vllm:
        runner = [str(args.vllm), str(HERE / "run_vllm.py")]
        yield System("vLLM", "bf16", [*runner, str(args.checkpoint), str(args.threads), works])
    if args.llama_cpp:
        whole = args.work / "llama-bf16.gguf"
        script = [sys.executable, str(args.llama_cpp / "convert_hf_to_gguf.py"), str(args.checkpoint)]
        environment = os.environ | {"PYTHONPATH": str(args.llama_cpp / "gguf-py")}
        outfile = ["--outtype", "bf16", "--outfile", str(whole)]
        convert(whole, lambda: subprocess.run([*script, *outfile], check=True, env=environment, capture_output=True))
        for format, kind in {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}.items():
            file = args.work / f"llama-{kind}.gguf"
            program = str(args.llama_cpp / "build/bin/llama-quantize")
            command = [program, str(whole), str(file), kind]
            convert(file, lambda c=command: subprocess.run(c, check=True, capture_output=True))
            runner = [sys.executable, str(HERE / "run_llama_cpp.py")]
            yield System("llama.cpp", format, [*runner, str(args.llama_cpp), str(file), str(args.threads), works])


def convert(target: Path, make: Callable[[], object]) -> None:
    """Once."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"making {target}", file=sys.stderr)
        make()


def export_openvino(args: argparse.Namespace, format: str, folder: Path) -> None:
    kept = {"bf16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--sym", "--group-size", "128", "--ratio", "1.0"]}
    program = [str(args.openvino.parent / "optimum-cli"), "export", "openvino", "--model", str(args.checkpoint)]
    task = ["--task", "text-generation-with-past", "--weight-format", *kept[format]]
    subprocess.run([*program, *task, str(folder)], check=True, capture_output=True)


def run(system: System) -> Iterator[tuple[Work, float]]:
    """The works in turn with the seconds each took; those a system cannot do are left out."""
    done = subprocess.run(system.command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{system.name} {system.format} failed:\n{done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        if line.startswith('{"work"'):
            told = json.loads(line)
            yield tuple(told["work"]), told["seconds"]


def rate(work: Work, taken: list[float]) -> float:
    """Tokens a second, the median of the rounds: those read where one is generated, those generated where few are read,
    else both."""
    prompts, read, generated = work
    tokens = prompts * (read if generated == 1 else generated if read < generated else read + generated)
    return statistics.median(tokens / seconds for seconds in taken)


def measure_limits(threads: int) -> dict[str, float]:
    """In a process of its own, as everybody else."""
    script = (
        f"import json; from penstock.ops import cpu; cpu.set_threads({threads}); print(json.dumps(vars(cpu.limits())))"
    )
    told: dict[str, float] = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True).stdout)
    return told


def machine() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{len(names)} cores of {names[0] if names else platform.machine()}"


def table(rates: dict[str, dict[Work, float]], limits: dict[str, float], formats: list[str]) -> str:
    lines = [
        f"Limits: reads {limits['read'] / 1e9:.0f} GB/s; products and sums of bfloat16 "
        f"{limits['bfloat16'] / 1e9:.0f} G/s, of 8-bit integers {limits['int8'] / 1e9:.0f} G/s.",
    ]
    for format in formats:
        own = {name.rsplit(" ", 1)[0]: r for name, r in rates.items() if name.endswith(f" {format}")}
        peers = [name for name in own if name != "Penstock"]
        head = ["tokens/s", "Penstock", *peers, *(["ratio to the best"] if peers else [])]
        lines += ["", f"**{format}**", "", row(head), row(["---", *["---:"] * (len(head) - 1)])]
        for work, label in WORKS.items():
            ours, theirs = own["Penstock"][work], [own[peer].get(work) for peer in peers]
            known = [one for one in theirs if one]
            ratio = [f"{ours / max(known):.2f}"] if known else ["–"] * bool(peers)
            lines.append(row([label, f"{ours:.0f}", *(f"{one:.0f}" if one else "–" for one in theirs), *ratio]))
    return "\n".join(lines)


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
