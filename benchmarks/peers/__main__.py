"""Penstock and the systems a user would pick instead, on the same checkpoint, in turns, beside the machine's limits.

python benchmarks/peers CHECKPOINT --openvino PYTHON --vllm PYTHON --llama-cpp FOLDER

Each peer is optional and lives in an environment of its own: give the ``python`` that has ``openvino-genai`` and
``optimum-intel``, the one that has ``vllm``, the folder of llama.cpp's source with its programs built in ``build/bin``.
Checkpoints are converted once, into ``--work``; llama.cpp's GGUF files of 8 and 4 bits are computed by Penstock, too.
All generate greedily, ignore the end of text and share no prefixes.

``--isa`` holds every system to an instruction set: Penstock by ``PENSTOCK_ISA``, OpenVINO by
``ONEDNN_MAX_CPU_ISA`` and a small library that says no where it asks the processor itself (which takes a C++ compiler).
llama.cpp computes with what it was compiled for, so its folder must hold a build for that set; others are refused. For
avx2: ``-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON``. vLLM cannot be held to one.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from drawing import OURS, WITH_PEERS_FILE, draw
from isa import ONEDNN, check_llama_cpp, hold_openvino
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
NAMES = dict(zip(["prefill-512", "prefill-2048", "decode-1", "decode-8", "decode-32", "mixed"], WORKS, strict=True))


@dataclass(frozen=True)
class System:
    """Something that says how long a work takes in a format, for each that it reads."""

    name: str
    format: str
    """``bf16``, ``int8`` or ``int4``: what stands beside each other."""
    command: list[str]
    environment: dict[str, str]
    """Beside that of this process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--openvino", type=Path, metavar="PYTHON")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--work", type=Path, default=Path("build/peers"), help="converted checkpoints (build/peers)")
    parser.add_argument("--format", nargs="+", choices=["bf16", "int8", "int4"], default=["bf16", "int8", "int4"])
    parser.add_argument("--works", nargs="+", choices=NAMES, default=list(NAMES), help="(default: all)")
    parser.add_argument("--isa", choices=ONEDNN, help="the instruction set that all are held to")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="turns each system takes, thrice as many in short works (default: 2)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw them here (.png or .svg)")
    args = parser.parse_args()
    if args.isa and args.vllm:
        parser.error("vLLM cannot be held to an instruction set: leave out --vllm or --isa")
    if args.isa and args.llama_cpp and (problem := check_llama_cpp(args.llama_cpp, args.isa)):
        parser.error(problem)

    works = [NAMES[name] for name in args.works]
    systems = list(found(args))
    seconds: dict[str, dict[Work, list[float]]] = {}
    limits = []
    for format in args.format:
        with ExitStack() as stack:
            takes = {s.name: stack.enter_context(running(s)) for s in systems if s.format == format}
            for turn in range(args.rounds):
                limits.append(measure_limits(args.threads, args.isa))
                for work in tqdm(works, desc=f"{format}, round {turn + 1}", unit="work"):
                    for name, take in list(takes.items()) * turns_of(work):
                        own = seconds.setdefault(f"{name} {format}", {each: [] for each in works})
                        own[work].append(take(work))
                keep(args.json, args.isa, limits, seconds)
    best = {name: max(one[name] for one in limits) for name in limits[0]}
    rates = {name: {work: rate(work, taken) for work, taken in own.items()} for name, own in seconds.items()}
    if args.picture:
        draw(args.picture, {name: {WORKS[w]: r for w, r in own.items()} for name, own in rates.items()}, args.format)
    held = f", held to {args.isa}" if args.isa else ""
    print(f"{machine()}{held}, {args.threads} threads, {args.rounds} rounds\n")
    print(table(rates, seconds, best, args.format))


def keep(
    path: Path | None, isa: str | None, limits: list[dict[str, float]], seconds: dict[str, dict[Work, list[float]]]
) -> None:
    """What is known so far, since a peer may fail after an hour."""
    if path:
        kept = {name: {WORKS[w]: taken for w, taken in own.items()} for name, own in seconds.items()}
        told = {"machine": machine(), "isa": isa, "limits": limits, "seconds": kept}
        path.write_text(json.dumps(told, indent=1) + "\n")


def found(args: argparse.Namespace) -> Iterator[System]:
    """What there is to run, converted where it must be."""
    own = penstock_environment(args.isa)
    ours = [sys.executable, str(HERE / "run_penstock.py"), str(args.checkpoint), str(args.threads)]
    for format, quantization in {"bf16": "none", "int8": "w8a8", "int4": "w4a8"}.items():
        yield System(OURS, format, [*ours, quantization], own)
    if args.openvino:
        held = hold_openvino(args.isa, args.work)
        for format in ("bf16", "int8", "int4"):
            folder = args.work / f"openvino-{format}"
            convert(folder, lambda f=format, to=folder: export_openvino(args, f, to))
            runner = [str(args.openvino), str(HERE / "run_openvino.py")]
            yield System("OpenVINO", format, [*runner, str(folder), str(args.threads)], held)
    if args.vllm:
        runner = [str(args.vllm), str(HERE / "run_vllm.py")]
        yield System("vLLM", "bf16", [*runner, str(args.checkpoint), str(args.threads)], {})
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
            yield System("llama.cpp", format, [*runner, str(args.llama_cpp), str(file), str(args.threads)], {})
            if format != "bf16":  # activations in 8 bits, as llama.cpp has them
                kept = "w8a8" if format == "int8" else "w4a8"
                runner = [sys.executable, str(HERE / "run_penstock.py")]
                yield System(WITH_PEERS_FILE, format, [*runner, str(file), str(args.threads), kept], own)


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


@contextmanager
def running(system: System) -> Iterator[Callable[[Work], float]]:
    """A system, ready; what is yielded gives the seconds of a work.

    All systems of a format are there at once and take turns work by work, so that what others do on the machine meets
    them alike; who is not asked sleeps.
    """
    with TemporaryFile("w+") as errors:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            system.command,
            env=os.environ | system.environment,
            text=True,
            bufsize=1,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
        )
        assert process.stdin
        assert process.stdout

        def told(what: str) -> Any:
            for line in process.stdout or ():
                if line.startswith(f'{{"{what}"'):
                    return json.loads(line)[what]
            errors.seek(0)
            sys.exit(f"{system.name} {system.format} failed:\n{errors.read()[-2000:]}")

        def take(work: Work) -> float:
            print(json.dumps(work), file=process.stdin)
            return float(told("seconds"))

        told("ready")
        try:
            yield take
        finally:
            process.stdin.close()
            process.wait()


def rate(work: Work, taken: list[float]) -> float:
    """Tokens a second, the median of the rounds: those read where one is generated, those generated where few are read,
    else both."""
    prompts, read, generated = work
    tokens = prompts * (read if generated == 1 else generated if read < generated else read + generated)
    return statistics.median(tokens / seconds for seconds in taken)


def turns_of(work: Work) -> int:
    """In a round: what disturbs a machine for a second must not decide about a work that takes one."""
    prompts, read, generated = work
    return 3 if prompts * (read + generated) < 1000 else 1


def penstock_environment(isa: str | None) -> dict[str, str]:
    return {"PENSTOCK_ISA": isa} if isa else {}


def measure_limits(threads: int, isa: str | None) -> dict[str, float]:
    """In a process of its own, as everybody else."""
    script = f"import json; from penstock.ops import cpu; cpu.set_threads({threads}); limits = cpu.measure_limits()"
    script += "; print(json.dumps(vars(limits)))"
    environment = os.environ | penstock_environment(isa)
    ran = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True)
    told: dict[str, float] = json.loads(ran.stdout)
    return told


def machine() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{len(names)} cores of {names[0] if names else platform.machine()}"


def table(
    rates: dict[str, dict[Work, float]],
    seconds: dict[str, dict[Work, list[float]]],
    limits: dict[str, float],
    formats: list[str],
) -> str:
    """Rates of all systems, and the median of the rounds' ratios of Penstock to the fastest peer of that round.

    Penstock with a peer's file is a column, and no peer.
    """
    lines = [
        f"Limits: reads {limits['read'] / 1e9:.0f} GB/s; products and sums of bfloat16 "
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
