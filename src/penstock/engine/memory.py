"""How much memory there is to use, with the limits of containers."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.core.errors import invalid
from penstock.core.options import EngineOptions
from penstock.ops import KVSpec

CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and usage, in the second and the first version of control groups."""
FREE_SHARE = 0.5
"""Of the host's free memory that a cache on the host takes by default."""


def free_host_bytes(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine or the container has free, whichever is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for limit, usage in CGROUPS:
        try:
            most, used = ((control_group / name).read_text().strip() for name in (limit, usage))
        except OSError:
            continue
        if most != "max":
            free = min(free, int(most) - int(used) + _reclaimable(control_group / usage))
    return max(free, 0)


def _reclaimable(usage: Path) -> int:
    """Bytes of a container's usage that are file cache, such as a checkpoint just read."""
    try:
        lines = (usage.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines if line)
    return sum(int(found.get(f"total_{kind}_file", found.get(f"{kind}_file", 0))) for kind in ("inactive", "active"))


def count_blocks(options: EngineOptions, size: int, spec: KVSpec, device: torch.device, mapped: int) -> int:
    """KV blocks that fit, or as many as were asked for.

    Args:
        size: bytes of a block, in all caches together.
        mapped: bytes of weights that are mapped from a disk. They count as free, but every step needs them.

    Raises ``PenstockError`` (``invalid``) where not even one fits.
    """
    if options.num_gpu_blocks_override:
        return options.num_gpu_blocks_override
    share = options.kv_cache_free_memory_fraction
    if options.kv_cache_memory_bytes:
        room = options.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = int(free * share if share else free - (1 - options.gpu_memory_utilization) * total)
    else:
        free = free_host_bytes() - mapped
        room = int(free * (share or FREE_SHARE)) - count_host_blocks(options, spec) * spec.bytes_per_block
    if room < size:
        raise invalid("kv_cache_memory_bytes", f"one KV block takes {size} bytes, and {max(room, 0)} are there")
    return room // size


def count_host_blocks(options: EngineOptions, spec: KVSpec) -> int:
    """Blocks of the host tier."""
    if options.preemption_mode != "swap":
        return 0
    return int(options.swap_space * 2**30) // spec.bytes_per_block
