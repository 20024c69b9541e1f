"""Performance advice for this machine, with the commands to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

GIB = 2**30
MAX_SWAPPED = 2**28
"""Bytes in swap above which advice is given."""


def advice(
    isa: str,
    built: Sequence[str],
    machine: Sequence[str],
    kv_bytes: int,
    free_bytes: int,
    cores: tuple[int, int],
    root: Path = Path("/"),
) -> list[str]:
    """Advice as sentences that end with a command.

    Args:
        isa: instruction set of the kernels in use; empty without CPU kernels.
        built, machine: instruction sets that are built and that the machine supports, the most advanced last.
        kv_bytes: configured size of the KV cache; 0: not set.
        free_bytes: free memory of this machine.
        cores: number of usable cores, and of all cores.
        root: folder that contains ``proc`` and ``sys``.
    """
    found = [_huge_pages(root), _governor(root), _cores(*cores), _swap(root), _swappiness(root)]
    found += [_instruction_set(isa, built, machine), _kv_cache(kv_bytes, free_bytes)]
    return [sentence for sentence in found if sentence]


def _huge_pages(root: Path) -> str:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if "[never]" not in _read(path):
        return ""
    return f"huge pages are off, which speed up weights and KV cache: echo madvise | sudo tee {path}"


def _governor(root: Path) -> str:
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    slow = sorted({governor for path in paths if (governor := _read(path)) not in ("", "performance")})
    if not slow:
        return ""
    command = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
    return f"the CPU frequency governor is {', '.join(slow)}: {command}"


def _cores(usable: int, total: int) -> str:
    if usable >= total:
        return ""
    message = f"only {usable} of {total} cores can be used, because of the process's affinity or the container's quota"
    return f"{message}: taskset -c 0-{total - 1} penstock serve, or docker update --cpus {total} CONTAINER"


def _swap(root: Path) -> str:
    lines = [line.partition(":") for line in _read(root / "proc/meminfo").splitlines()]
    sizes = {name: value for name, _, value in lines}
    used = (_kilobytes(sizes.get("SwapTotal", "")) - _kilobytes(sizes.get("SwapFree", ""))) * 1024
    if used <= MAX_SWAPPED:
        return ""
    return f"{used / GIB:.1f} GiB are in swap; if enough memory is free: sudo swapoff -a && sudo swapon -a"


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
        return f"kernels for {best} are built, but {isa} is selected: unset PENSTOCK_ISA"
    return f"kernels for {best} are not built: pip install --force-reinstall --no-deps . (in the source folder)"


def _kv_cache(kv_bytes: int, free_bytes: int) -> str:
    if kv_bytes <= free_bytes:
        return ""
    half = max(free_bytes // 2, 1)
    message = f"the KV cache is set to {kv_bytes / GIB:.1f} GiB, but only {free_bytes / GIB:.1f} GiB are free"
    return f"{message}: export PENSTOCK_KV_CACHE_MEMORY_BYTES={half}"


def _kilobytes(value: str) -> int:
    return int((value.split() or ["0"])[0])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
