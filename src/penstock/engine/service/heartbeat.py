"""The engine's heartbeat: the time of the last iteration of its loop, and the last time at which a thread of the
process ran. The engine's launcher and clients map its memory.

A process that hangs in native code or is stopped sends no messages, and a process with a long queue sends them late.
Mapped memory does not depend on messages: every process that maps it can read the age of the heartbeat at any time.
"""

from __future__ import annotations

import mmap
import os
import threading
import time

SIZE = 24
"""Size of the heartbeat, bytes: three float64, which are the time of the last heartbeat (monotonic clock), the seconds
from then until the next one is due, and the time at which the process last ran."""
RUN_INTERVAL = 0.5
"""Interval at which the process records that it runs, seconds."""


class Heartbeat:
    """The heartbeat of the engine at an address.

    Args:
        address: address of the engine, ``ipc://…``.
    """

    def __init__(self, address: str) -> None:
        file = os.open(address.removeprefix("ipc://") + ".heartbeat", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, SIZE)  # a write to a sparse file on a full disk would kill the process
            self._memory = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._values = memoryview(self._memory).cast("d")

    def beat(self, expected: float = 0.0) -> None:
        """Record an iteration of the engine's loop. The next iteration is due in ``expected`` seconds."""
        self._values[1] = expected
        self._values[0] = time.monotonic()

    def report_running(self) -> None:
        """Start a thread that records every ``RUN_INTERVAL`` seconds that this process runs."""

        def record() -> None:
            while True:
                self._values[2] = time.monotonic()
                time.sleep(RUN_INTERVAL)

        threading.Thread(target=record, name="running", daemon=True).start()

    def reset(self) -> None:
        """Clear the heartbeat before an engine starts."""
        self._values[0] = self._values[2] = 0.0

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat; 0 before the first one."""
        return max(time.monotonic() - self._values[0], 0.0) if self._values[0] else 0.0

    @property
    def stopped(self) -> float:
        """Seconds for which the process has not run, for example after SIGSTOP; 0 before ``report_running``."""
        return max(time.monotonic() - self._values[2] - RUN_INTERVAL, 0.0) if self._values[2] else 0.0

    @property
    def overdue(self) -> float:
        """Seconds by which the next heartbeat is overdue; 0 if it is not due yet."""
        return max(self.age - self._values[1], 0.0)

    def close(self) -> None:
        self._values.release()
        self._memory.close()
