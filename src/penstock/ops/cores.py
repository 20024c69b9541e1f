"""The cores that this process may use, and how ranks share them."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.core.errors import invalid

FIELD = "cpu_binding"
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""CPU quota and its period, in the second and the first version of control groups."""


def usable_cores(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its CPU affinity, or the CPU quota of its container where that is lower."""
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
    """The cores that one of so many ranks on this host is bound to; empty where it is bound to none.

    Args:
        binding: the option ``cpu_binding``. ``auto`` shares out the usable cores evenly, those of a NUMA node together,
            where there is one for each rank at least; ``none`` binds nothing; else a list of cores for each rank.

    Raises ``PenstockError`` (``invalid``) for a binding that cannot be read, or is not for so many ranks.
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
        raise invalid(FIELD, f"{binding!r} has cores for {len(lists)} ranks, and there are {size}", size)
    return set.union(*(_range(text) for text in lists[rank].split(",")))


def check_cores(cores: set[int]) -> None:
    """Raises ``PenstockError`` (``invalid``) where the machine does not have some of the cores, or this process may not
    use them."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores or before)
        missing = cores - os.sched_getaffinity(0)
    except (OSError, OverflowError):
        missing = cores
    finally:
        os.sched_setaffinity(0, before)
    if missing:
        words = f"names cores that this process cannot use: {_describe(missing)} (it can use {_describe(before)})"
        raise invalid(FIELD, words)


def bind_replica(binding: str, replica: int, replicas: int, ranks: int) -> str:
    """Bind this process, the engine of a data-parallel replica, to its share of the cores.

    Args:
        binding: the option ``cpu_binding``, for the ranks of all replicas.
        ranks: number of ranks of each replica.

    Returns:
        ``cpu_binding`` for the replica's own ranks, within its share.

    Raises ``PenstockError`` as ``cores_of_rank`` and ``check_cores``.
    """
    if binding in ("auto", "none"):
        cores = cores_of_rank(binding, replica, replicas)
    else:
        own = range(replica * ranks, (replica + 1) * ranks)
        each = [cores_of_rank(binding, rank, replicas * ranks) for rank in own]
        cores, binding = set.union(*each), "|".join(map(_describe, each)) if ranks > 1 else "none"
    if cores:
        check_cores(cores)
        os.sched_setaffinity(0, cores)
    return binding


def describe_placement(binding: str, size: int) -> str:
    """The cores of each of so many ranks, as ``cpu_binding`` may be written: ``0-15|16-31``; "not bound"
    where they are bound to none. Raises as ``cores_of_rank``."""
    shares = [cores_of_rank(binding, rank, size) for rank in range(size)]
    return "|".join(map(_describe, shares)) if all(shares) else "not bound"


def describe_nodes() -> str:
    """The usable cores of each NUMA node: ``0: 0-15, 1: 16-31``."""
    nodes: dict[int, set[int]] = {}
    for core in os.sched_getaffinity(0):
        nodes.setdefault(_node_of(core), set()).add(core)
    return ", ".join(f"{node}: {_describe(nodes[node])}" for node in sorted(nodes))


def _describe(cores: set[int]) -> str:
    """``{0, 1, 2, 5}`` as ``0-2,5``."""
    texts, left = [], sorted(cores)
    while left:
        count = next((i for i, core in enumerate(left) if core != left[0] + i), len(left))
        texts.append(f"{left[0]}-{left[count - 1]}" if count > 1 else str(left[0]))
        left = left[count:]
    return ",".join(texts)


def _range(text: str) -> set[int]:
    first, dash, last = text.strip().partition("-")
    try:
        cores = set(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        cores = set()
    if not cores:
        raise invalid(
            FIELD, f"{text!r} is neither a core nor a range of them: write 0-15,16-31, or 0-7,16-23|8-15,24-31"
        )
    return cores


def _node_of(core: int) -> int:
    """The NUMA node of a core; 0 where the system does not tell."""
    nodes = Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)
