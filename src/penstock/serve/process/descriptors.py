"""Logs when file descriptors run out: the kernel then refuses connections silently."""

from __future__ import annotations

import logging
import os
import resource
import time

logger = logging.getLogger("penstock")

ALMOST_ALL = 0.95
"""Share of the descriptors that a process may have, from which on it is logged."""
REPORT_INTERVAL = 60.0
"""Seconds between two lines of the log."""


class DescriptorWatch:
    """Logs that a process has almost no file descriptors left."""

    def __init__(self) -> None:
        self._reported = -REPORT_INTERVAL

    def check(self) -> None:
        """Check now. The system gives the lowest free number, which tells how many are open."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            number = os.open("/", os.O_PATH | os.O_CLOEXEC)
            os.close(number)
        except OSError:
            number = limit
        now = time.monotonic()
        if number < ALMOST_ALL * limit or now - self._reported < REPORT_INTERVAL:
            return
        self._reported = now
        advice = "further connections are closed; raise ulimit -n, or lower max_concurrency"
        logger.warning("%d of %d file descriptors are open: %s", number, limit, advice)
