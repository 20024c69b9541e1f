"""``penstock doctor``: show hardware, kernels and caches of this machine, and performance advice."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

from penstock.config.options import EngineOptions
from penstock.config.sources import read
from penstock.core import PenstockError
from penstock.version import __version__

from .interrupts import ending_at_ctrl_c
from .machine_report import machine_report
from .screen import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON")
    about = "add system, GPUs, versions of packages, and environment variables (secrets masked), for a bug report"
    parser.add_argument("--report", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    result = inspect_machine()
    if args.report:
        result |= machine_report()
    if args.json:
        print_json(result)
    else:
        for name, value in result.items():
            for line in value if isinstance(value, list) else [value]:
                print(f"{name:<12} {line}")
    return 0 if result["kernels"] != "reference" else 1


def inspect_machine() -> dict[str, Any]:
    """Properties of the machine by name, as text or lists of text."""
    with ending_at_ctrl_c():
        import torch

        from penstock.engine.checks.speculation import why_off
        from penstock.ops import backend
    from penstock.ops.cores import describe_nodes, describe_placement, usable_cores
    from penstock.planning.host_memory import free_host_bytes
    from penstock.serve.web.files import describe_libraries

    from .advice import advice

    ops, options = backend(torch.device("cpu")), read({}, None).configuration.engine
    isa, built, machine = "", list[str](), list[str]()
    result: dict[str, Any] = {
        "penstock": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "memory": f"{free_host_bytes() / 2**30:.1f} GiB free",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "kernels": ops.NAME,
        "fingerprint": ops.fingerprint(),
    }
    if torch.cuda.is_available():
        result["gpu kernels"] = backend(torch.device("cuda")).fingerprint()
    if ops.NAME == "cpu":
        from penstock.ops import _kernels, native

        isa, built, machine = _kernels.current(), [*_kernels.BUILT], [*_kernels.MACHINE]
        requested = os.environ.get(native.VARIABLE)
        result["isa"] = isa + (f" ({native.VARIABLE})" if requested else "")
        result["built"] = ", ".join(built)
        result["machine"] = ", ".join(machine)
        result["threads"] = str(usable_cores())
        result["numa nodes"] = describe_nodes()
        ranks = max(2, options.tensor_parallel_size * options.pipeline_parallel_size // options.nnodes)
        try:
            placed = describe_placement(options.cpu_binding, ranks)
        except PenstockError as error:
            placed = str(error)
        result[f"{ranks} ranks"] = f"{placed} (cpu_binding {options.cpu_binding})"
        if problem := native.outdated_warning():
            result["advice"] = problem
    else:
        result["advice"] = "install a C++ compiler (apt install g++), then reinstall penstock to build the CPU kernels"
    off = why_off(options)
    result["speculation"] = f"off ({off})" if off else "suffix decoding by default"
    result["web page"] = describe_libraries()
    result["weights"] = _weight_cache(options)
    cores = usable_cores(), os.cpu_count() or 1
    found = advice(isa, built, machine, options.kv_cache_memory_bytes, free_host_bytes(), cores)
    result["faster"] = found or ["no advice"]
    return result


def _weight_cache(options: EngineOptions) -> str:
    """One-line description of the weight cache: folder, number of files, size and limit."""
    from penstock.config.cache_folder import cache_folder, disk_usage

    folder = cache_folder(options.weight_cache_dir)
    if folder is None:
        return "no weight cache (weight_cache_dir none)"
    usage = disk_usage(folder, options.weight_cache_size)
    return f"{folder}: {usage.files} files, {usage.used / 2**30:.1f} of at most {usage.limit / 2**30:.1f} GiB"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.machine()
