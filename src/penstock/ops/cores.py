"""CPU cores that this process may use, and their assignment to ranks."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.core.errors import invalid

FIELD = "cpu_binding"
"""Name of the option in errors."""
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files of the CPU quota and its period in cgroups v2 and v1."""


def usable_cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of cores that this process may use: the lower of its CPU affinity and the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0))
    for files in QUOTAS:
        try:
            quota, period = " ".join((control_group / name).read_text() for name in files).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            cores = max(1, min(cores, int(quota) // int(period)))
    return cores


def cores_of_rank(binding: str, rank: int, size: int) -> set[int]:
    """Return the cores to which a rank on this host is bound; empty: not bound.

    Args:
        binding: the option ``cpu_binding``. ``auto`` divides the usable cores evenly, in the order of NUMA nodes, if
            each rank gets at least one core; ``none`` does not bind; otherwise a list of cores per rank.
        size: number of ranks on this host.

    Raises ``PenstockError`` (``invalid``) if the binding is malformed, or for another number of ranks.
    """
    if binding == "none":
        return set()
    if binding == "auto":
        cores = sorted(os.sched_getaffinity(0), key=lambda core: (_node_of(core), core))
        if len(cores) < size:
            return set()
        first, end = (len(cores) * number // size for number in (rank, rank + 1))
        return set(cores[first:end])
    lists = [binding] if size == 1 else binding.split("|" if "|" in binding else ",")
    if len(lists) != size:
        raise invalid(FIELD, f"{binding!r} has cores for {len(lists)} ranks, but this host has {size} ranks", size)
    return set.union(*(_range(text) for text in lists[rank].split(",")))


def check_cores(cores: set[int]) -> None:
    """Raise ``PenstockError`` (``invalid``) for cores that do not exist or that this process may not use."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores or before)
        missing = cores - os.sched_getaffinity(0)
    except (OSError, OverflowError):
        missing = cores
    finally:
        os.sched_setaffinity(0, before)
    if missing:
        message = f"this process cannot use the cores {_describe(missing)}: name cores among {_describe(before)}"
        raise invalid(FIELD, message)


def bind_replica(binding: str, replica: int, replicas: int, ranks: int) -> str:
    """Bind this process, the engine of a data-parallel replica, to its share of the cores.

    Args:
        binding: the option ``cpu_binding``, for the ranks of all replicas.
        ranks: number of ranks per replica.

    Returns:
        ``cpu_binding`` for the ranks of this replica, within its share.

    Raises the errors of ``cores_of_rank`` and ``check_cores``.
    """
    if binding in ("auto", "none"):
        cores = cores_of_rank(binding, replica, replicas)
    else:
        numbers = range(replica * ranks, (replica + 1) * ranks)
        by_rank = [cores_of_rank(binding, number, replicas * ranks) for number in numbers]
        cores, binding = set.union(*by_rank), "|".join(map(_describe, by_rank)) if ranks > 1 else "none"
    if cores:
        check_cores(cores)
        os.sched_setaffinity(0, cores)
    return binding


def describe_placement(binding: str, size: int) -> str:
    """Return the cores of each rank in the syntax of ``cpu_binding``, such as ``0-15|16-31``; "not bound" if ranks are
    not bound. Raises the errors of ``cores_of_rank``."""
    shares = [cores_of_rank(binding, rank, size) for rank in range(size)]
    return "|".join(map(_describe, shares)) if all(shares) else "not bound"


def describe_nodes() -> str:
    """Return the usable cores of each NUMA node, such as ``0: 0-15, 1: 16-31``."""
    nodes: dict[int, set[int]] = {}
    for core in os.sched_getaffinity(0):
        nodes.setdefault(_node_of(core), set()).add(core)
    return ", ".join(f"{node}: {_describe(nodes[node])}" for node in sorted(nodes))


def _describe(cores: set[int]) -> str:
    """Format ``{0, 1, 2, 5}`` as ``0-2,5``."""
    ranges, rest = [], sorted(cores)
    while rest:
        count = next((i for i, core in enumerate(rest) if core != rest[0] + i), len(rest))
        ranges.append(f"{rest[0]}-{rest[count - 1]}" if count > 1 else str(rest[0]))
        rest = rest[count:]
    return ",".join(ranges)


def _range(text: str) -> set[int]:
    """Parse a core (``3``) or a range of cores (``0-15``)."""
    first, dash, last = text.strip().partition("-")
    try:
        cores = set(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        cores = set()
    if not cores:
        raise invalid(FIELD, f"{text!r} is not a core or a range: write 0-15,16-31, or 0-7,16-23|8-15,24-31")
    return cores


def _node_of(core: int) -> int:
    """NUMA node of a core; 0 if unknown."""
    nodes = Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)
