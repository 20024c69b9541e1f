"""Checks and benchmarks of the CUDA backend that need a GPU: correctness, and performance relative to the roofline.

    python benchmarks/gpu [--out FOLDER] [--parts NAME,…] [--minutes 8] [--tune]

Runs from the repository, installed or not, without a network and without the compiled CPU kernels. Every part runs in
separate processes, so that a failure does not affect other parts. Writes results.json, results.md and, if matplotlib is
installed, results.png. Exits with 1 if a part failed or found errors, with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from shapes import FULL, INTERPRETED, Scale

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
MISSING = "install msgspec and xxhash; without a network, see --packages in benchmarks/gpu/README.md"
CHECKS = {"ops": 240, "models": 100, "graphs": 100, "contract": 200}
"""Time limits per process in seconds of the parts that check correctness; they run concurrently."""
MEASURES = {"device": 30, "roofline": 60, "counterparts": 110}
"""Time limits per process in seconds of the parts that measure time; they run one after the other."""
TUNING = 300
PORTIONS = 14
"""Number of processes for the checks of ops, each of which compiles a kernel."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="results folder (default: gpu-results)")
    parts = ", ".join([*MEASURES, *CHECKS, "tuning"])
    parser.add_argument("--parts", help=f"comma-separated parts to run: {parts} (default: all but tuning)")
    parser.add_argument("--models", help="comma-separated models for roofline and counterparts (default: all)")
    jobs = max(1, min(8, (os.cpu_count() or 2) // 2))
    about = "number of checks that run in parallel (default: half of the cores, at most 8)"
    parser.add_argument("--jobs", type=int, default=jobs, help=about)
    parser.add_argument("--minutes", type=float, default=8, help="time limit of the whole run in minutes (default: 8)")
    parser.add_argument("--tune", action="store_true", help="also try other tiles for matrix products (4 more minutes)")
    parser.add_argument("--interpret", action="store_true", help="tiny version in Triton's interpreter, on a CPU")
    parser.add_argument("--ops", default="cuda", help=argparse.SUPPRESS)  # "reference" is for tests of this script
    parser.add_argument("--packages", type=Path, help="folder of unpacked wheels, for packages that are not installed")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)  # run one part in this process
    args = parser.parse_args()
    if args.packages:
        sys.path.append(str(args.packages.resolve()))
    sys.path.insert(0, str(SOURCE))
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    if args.run:
        return run_part(args.out, args.result, scale_of(args), *args.run)
    try:
        import msgspec  # noqa: F401
        import torch
        import xxhash  # noqa: F401
    except ImportError as error:
        print(f"{error}: {MISSING}", file=sys.stderr)
        return 2
    if not args.interpret and not torch.cuda.is_available():
        print("No GPU is available to PyTorch; --interpret runs a tiny version without one.", file=sys.stderr)
        return 2
    return run_all(args)


def run_all(args: argparse.Namespace) -> int:
    scale = scale_of(args)
    wanted = args.parts.split(",") if args.parts else [*MEASURES, *CHECKS, *(["tuning"] if args.tune else [])]
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    results: dict[str, Any] = {}
    writing = Lock()

    def run(part: str) -> None:
        limit = {**CHECKS, **MEASURES, "tuning": TUNING}.get(part.split()[0], 60)
        if args.interpret:  # on a CPU of unknown speed, perhaps beside other work: only --minutes limits a part
            limit = 60 * args.minutes
        remaining = limit if part == "tuning" else min(limit, ends - time.monotonic())
        begun = time.monotonic()
        found = run_process(args, part, remaining) if remaining > 5 else {"failure": "no time left (--minutes)"}
        with writing:
            results[part] = found | {"seconds": time.monotonic() - begun}
            print(f"{part}: {summary(results[part])} ({results[part]['seconds']:.0f} s)", flush=True)
            (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    run_alone = [part for name in wanted if name not in CHECKS for part in processes(name, scale, args)]
    if "device" in run_alone:
        run_alone.remove("device")
        run("device")
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, [part for name in wanted if name in CHECKS for part in processes(name, scale, args)]))
    for part in run_alone:
        run(part)
    from report import draw, markdown

    (args.out / "results.md").write_text(markdown(results))
    drawn = draw(args.out / "results.png", results)
    print(f"Results are in {args.out}{'' if drawn else ' (without a picture)'}.")
    return int(any(not is_right(part) for part in results.values()))


def processes(name: str, scale: Scale, args: argparse.Namespace) -> list[str]:
    """Name and arguments of each process of a part."""
    measured = [each.name for each in (*scale.models, *scale.measured)]
    chosen = args.models.split(",") if args.models else measured
    match name:
        case "ops":
            return [f"ops {portion}/{PORTIONS}" for portion in range(PORTIONS)]
        case "models":
            return [f"models {model.name}" for model in scale.models]
        case "contract":
            first, *others = scale.compared
            return [f"contract {first.name} {format}" for format in scale.formats] + [
                f"contract {model.name} {format}" for model in others for format in scale.formats[:1]
            ]
        case "roofline":
            return [f"roofline {model} {format}" for model in measured if model in chosen for format in scale.formats]
        case "counterparts":
            return [f"counterparts {model.name}" for model in scale.models if model.name in chosen]
        case _:
            return [name]


def scale_of(args: argparse.Namespace) -> Scale:
    return replace(INTERPRETED if args.interpret else FULL, ops=args.ops)


def run_process(args: argparse.Namespace, part: str, seconds: float) -> dict[str, Any]:
    """Run a part in a process; returns its results. Its output is written to a log file."""
    name = part.replace(" ", "-").replace("/", "-of-")
    result, log = args.out / f"{name}.json", args.out / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(HERE), "--out", str(args.out), "--result", str(result)]
    command += ["--ops", args.ops, *["--interpret"] * args.interpret]
    command += ["--packages", str(args.packages)] if args.packages else []
    with log.open("w") as file:
        try:
            subprocess.run([*command, "--run", *part.split()], stdout=file, stderr=file, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"failure": f"the process took more than {seconds:.0f} seconds"}
    if not result.exists():
        lines = log.read_text().strip().splitlines()
        return {"failure": f"the process ended without a result: {' / '.join(lines[-3:])}"}
    found: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return found


def run_part(out: Path, result: Path, scale: Scale, part: str, *given: str) -> int:
    """Run a part in this process, and write its results to a file."""
    try:
        if scale.interpret:
            sys.path.append(str(HERE.parent.parent / "tests/support"))
            importlib.import_module("interpreted")  # accumulates matrix products like a GPU
        limits = {}
        if part in ("roofline", "counterparts"):
            known = json.loads((out / "results.json").read_text()) if (out / "results.json").exists() else {}
            limits = known.get("device", {}).get("limits") or importlib.import_module("device").run(scale)["limits"]
        match part:
            case "ops":
                found = importlib.import_module("op_checks").run(scale, *given)
            case "models" | "graphs" | "contract":
                found = getattr(importlib.import_module("invariance"), part)(scale, *given)
            case "roofline" | "counterparts":
                found = importlib.import_module(part).run(scale, limits, *given)
            case _:
                found = importlib.import_module(part).run(scale)
    except Exception:
        traceback.print_exc()
        found = {"failure": traceback.format_exc()[-3000:]}
    result.write_text(json.dumps(found))
    return 0


def summary(part: dict[str, Any]) -> str:
    if "failure" in part:
        return f"FAILED: {part['failure'].strip().splitlines()[-1]}"
    if "checks" in part:
        return f"{part['count'] - len(part['wrong'])} of {part['count']} right"
    failures = [row for row in part.get("rows", []) if "failure" in row]
    return f"{len(failures)} of {len(part['rows'])} FAILED" if failures else "done" if is_right(part) else "WRONG"


def is_right(part: dict[str, Any]) -> bool:
    rows = [part, *part.get("rows", []), *(value for value in part.values() if isinstance(value, dict))]
    return not part.get("wrong") and all("failure" not in row and row.get("right", True) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
