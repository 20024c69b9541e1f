"""The engine's heartbeat: when its loop last came round, in memory that its owner and its clients map.

A process that hangs in native code or was stopped sends no messages, and one whose queue is long sends them late. The
time in this memory depends on neither: whoever maps it knows at any moment how old the last heartbeat is.
"""

from __future__ import annotations

import mmap
import os
import time

SIZE = 16
"""Bytes: two float64, the time of the last heartbeat on the monotonic clock and the seconds until the next is due."""
DECAY = 0.95
"""Of the slowest seconds a token, for each step: one outlier is forgotten after some dozens of steps."""


class Heartbeat:
    """The heartbeat of the engine at an address.

    Args:
        address: where it serves, ``ipc://…``.
    """

    def __init__(self, address: str) -> None:
        file = os.open(address.removeprefix("ipc://") + ".heartbeat", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, SIZE)  # changes nothing where it is there already
            self._memory = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._values = memoryview(self._memory).cast("d")

    def beat(self, expected: float = 0.0) -> None:
        """The engine's loop has come round; the next time will be in ``expected`` seconds or soon after."""
        self._values[1] = expected
        self._values[0] = time.monotonic()

    def reset(self) -> None:
        """There is no engine now; one may be about to start."""
        self._values[0] = 0.0

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat; 0 before the first one."""
        return max(time.monotonic() - self._values[0], 0.0) if self._values[0] else 0.0

    @property
    def overdue(self) -> float:
        """Seconds since the next heartbeat was expected; 0 where it was not yet."""
        return max(self.age - self._values[1], 0.0)

    def close(self) -> None:
        self._values.release()
        self._memory.close()


class StepTimes:
    """How long steps take, so that a long one is not taken for a hang.

    Args:
        first: seconds that the first step may take, of which nothing is known yet.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._per_token: float | None = None
        self.longest = 0.0
        """Seconds of the longest step so far."""

    def expected(self, tokens: int) -> float:
        """Seconds that a step of so many tokens may take. A bound rather than a guess: steps of few tokens take more
        time for each of them, as all weights are read whatever the number."""
        return self._first if self._per_token is None else tokens * self._per_token

    def add(self, tokens: int, seconds: float) -> None:
        """A step has taken so long."""
        self.longest = max(self.longest, seconds)
        self._per_token = max(seconds / max(tokens, 1), DECAY * (self._per_token or 0.0))
