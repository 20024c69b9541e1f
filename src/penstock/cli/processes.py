"""Process trees of this machine: memory, and the end of processes."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

PROC = Path("/proc")
BOOT_CLOCK = time.CLOCK_BOOTTIME
LONGEST_WAIT = 1e6
"""Maximum seconds of a wait: select refuses much longer ones, and infinity."""


def parents() -> dict[int, int]:
    """Process id of the parent of each process."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):  # the process has ended
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def ancestors(pid: int, parents: Mapping[int, int]) -> set[int]:
    """Process ids of the parent, its parent, and so on."""
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def tree(pid: int, parents: Mapping[int, int]) -> list[int]:
    """Process ids of a process and its descendants, parents first."""
    children = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)
    found = [pid]
    for each in found:
        found += children[each]
    return found


def resident_bytes(pids: Sequence[int]) -> int:
    """Resident host memory of processes in bytes. Each page that processes share is divided among them (PSS)."""
    total = 0
    for pid in pids:
        with suppress(OSError):  # the process has ended
            text = (PROC / str(pid) / "smaps_rollup").read_text()
            if match := re.search(r"^Pss:\s*(\d+) kB$", text, re.MULTILINE):
                total += 1024 * int(match[1])
    return total


def age(start_time: str) -> float:
    """Seconds since a process's start (``process_start_time``)."""
    return time.clock_gettime(BOOT_CLOCK) - int(start_time) / os.sysconf("SC_CLK_TCK")


class ProcessHandle:
    """A running process, which a later process with the same id cannot be mistaken for.

    Raises ``ProcessLookupError`` if there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; returns False if it still runs after ``seconds``."""
        return bool(select.select([self._descriptor], [], [], min(max(0.0, seconds), LONGEST_WAIT))[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
