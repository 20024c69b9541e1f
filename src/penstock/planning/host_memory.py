"""Free memory of the host or container."""

from __future__ import annotations

from pathlib import Path

CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Names of the files with memory limit and usage, for cgroup v2 and v1."""
FREE_SHARE = 0.5
"""Share of the host's free memory that the KV cache of a CPU engine takes by default."""


def free_host_bytes(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of the machine or the container, whichever is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for limit, usage in CGROUPS:
        try:
            maximum, used = ((control_group / name).read_text().strip() for name in (limit, usage))
        except OSError:
            continue
        if maximum != "max":
            free = min(free, int(maximum) - int(used) + _reclaimable(control_group / usage))
    return max(free, 0)


def _reclaimable(usage: Path) -> int:
    """Bytes of a container's page cache (such as a checkpoint that was just read): used, but reclaimable."""
    try:
        lines = (usage.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    result = dict(line.split() for line in lines if line)
    return sum(int(result.get(f"total_{kind}_file", result.get(f"{kind}_file", 0))) for kind in ("inactive", "active"))
