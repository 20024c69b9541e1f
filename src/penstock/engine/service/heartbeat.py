"""The engine's heartbeat: the time of its loop's last iteration, in memory that its launcher and its clients map, and
the last time at which the process ran at all, which a thread writes there while a step takes long.

A process that hangs in native code or was stopped sends no messages, and one whose queue is long sends them late. The
time in this memory depends on neither: whoever maps it knows at any moment how old the last heartbeat is.
"""

from __future__ import annotations

import mmap
import os
import threading
import time

SIZE = 24
"""Bytes: three float64, the time of the last heartbeat on the monotonic clock, the seconds until the next is due, and
the time at which the process ran last."""
RUN_INTERVAL = 0.5
"""Seconds between two times at which the process notes that it runs."""


class Heartbeat:
    """The heartbeat of the engine at an address.

    Args:
        address: where it serves, ``ipc://…``.
    """

    def __init__(self, address: str) -> None:
        file = os.open(address.removeprefix("ipc://") + ".heartbeat", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, SIZE)  # not sparse: writing where a full disk has no room ends the process
            self._memory = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._values = memoryview(self._memory).cast("d")

    def beat(self, expected: float = 0.0) -> None:
        """Record an iteration of the engine's loop. The next is due in ``expected`` seconds."""
        self._values[1] = expected
        self._values[0] = time.monotonic()

    def note_running(self) -> None:
        """Note, from a thread of its own until the process ends, that this process runs."""

        def note() -> None:
            while True:
                self._values[2] = time.monotonic()
                time.sleep(RUN_INTERVAL)

        threading.Thread(target=note, name="running", daemon=True).start()

    def reset(self) -> None:
        """Clear the heartbeat before an engine starts."""
        self._values[0] = self._values[2] = 0.0

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat; 0 before the first one."""
        return max(time.monotonic() - self._values[0], 0.0) if self._values[0] else 0.0

    @property
    def stopped(self) -> float:
        """Seconds for which the process has not run at all, as one that SIGSTOP has stopped; 0 before it ran first."""
        return max(time.monotonic() - self._values[2] - RUN_INTERVAL, 0.0) if self._values[2] else 0.0

    @property
    def overdue(self) -> float:
        """Seconds since the next heartbeat was expected; 0 where it was not yet."""
        return max(self.age - self._values[1], 0.0)

    def close(self) -> None:
        self._values.release()
        self._memory.close()
