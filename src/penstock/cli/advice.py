"""What to change on a machine to be faster, each with the command to type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

GIB = 2**30
MAX_SWAPPED = 2**28
"""Bytes in swap that say nothing."""


def advice(
    isa: str,
    built: Sequence[str],
    machine: Sequence[str],
    kv_bytes: int,
    free_bytes: int,
    cores: tuple[int, int],
    root: Path = Path("/"),
) -> list[str]:
    """Sentences that end in a command.

    Args:
        isa: instruction set of the kernels that run; empty where there are none.
        built, machine: instruction sets that are built, and those that the machine has, from the least.
        kv_bytes: memory that the configuration gives the KV cache; 0 where it is a share.
        free_bytes: memory of this machine that is free.
        cores: how many may be used, and how many there are.
        root: where ``proc`` and ``sys`` are.
    """
    found = [_huge_pages(root), _governor(root), _cores(*cores), _swap(root), _swappiness(root)]
    found += [_instruction_set(isa, built, machine), _kv_cache(kv_bytes, free_bytes)]
    return [sentence for sentence in found if sentence]


def _huge_pages(root: Path) -> str:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if "[never]" not in _read(path):
        return ""
    return f"huge pages are off, which weights and KV cache ask for: echo madvise | sudo tee {path}"


def _governor(root: Path) -> str:
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    slow = sorted({governor for path in paths if (governor := _read(path)) not in ("", "performance")})
    if not slow:
        return ""
    command = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    return f"the CPU frequency governor is {', '.join(slow)}: {command}"


def _cores(usable: int, there: int) -> str:
    if usable >= there:
        return ""
    words = f"{usable} of {there} cores may be used, by this process's affinity or its container's quota"
    return f"{words}: taskset -c 0-{there - 1} penstock serve, or docker update --cpus {there} CONTAINER"


def _swap(root: Path) -> str:
    lines = [line.partition(":") for line in _read(root / "proc/meminfo").splitlines()]
    sizes = {name: value for name, _, value in lines}
    used = (_kilobytes(sizes.get("SwapTotal", "")) - _kilobytes(sizes.get("SwapFree", ""))) * 1024
    if used <= MAX_SWAPPED:
        return ""
    return f"{used / GIB:.1f} GiB are in swap; with enough free memory: sudo swapoff -a && sudo swapon -a"


def _swappiness(root: Path) -> str:
    has_swap = len(_read(root / "proc/swaps").splitlines()) > 1
    given = _read(root / "proc/sys/vm/swappiness")
    if not has_swap or not given.isdecimal() or int(given) <= 10:
        return ""
    return f"the kernel may swap weights out (swappiness {given}): sudo sysctl vm.swappiness=10"


def _instruction_set(isa: str, built: Sequence[str], machine: Sequence[str]) -> str:
    best = machine[-1] if machine else ""
    if not isa or not best or isa == best:
        return ""
    if best in built:
        return f"kernels for {best} are built and {isa} is chosen: unset PENSTOCK_ISA"
    return f"kernels for {best} are not built: pip install --force-reinstall --no-deps ., in its sources"


def _kv_cache(kv_bytes: int, free_bytes: int) -> str:
    if kv_bytes <= free_bytes:
        return ""
    half = max(free_bytes // 2, 1)
    words = f"the KV cache is to have {kv_bytes / GIB:.1f} GiB, and {free_bytes / GIB:.1f} GiB are free"
    return f"{words}: export PENSTOCK_KV_CACHE_MEMORY_BYTES={half}"


def _kilobytes(value: str) -> int:
    return int((value.split() or ["0"])[0])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
