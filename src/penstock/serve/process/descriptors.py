"""Warning when file descriptors run out: further connections then fail silently."""

from __future__ import annotations

import logging
import os
import resource
import time

logger = logging.getLogger("penstock")

WARN_FRACTION = 0.95
"""Fraction of the descriptor limit in use above which a warning is logged."""
REPORT_INTERVAL = 60.0
"""Minimum time between warnings in seconds."""


class DescriptorWatch:
    """Logs a warning when a process has almost no file descriptors left."""

    def __init__(self) -> None:
        self._reported = -REPORT_INTERVAL

    def check(self) -> None:
        """Log a warning if almost all descriptors are open. The system assigns the lowest free number, which is about
        the number of open descriptors."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            number = os.open("/", os.O_PATH | os.O_CLOEXEC)
            os.close(number)
        except OSError:
            number = limit
        now = time.monotonic()
        if number < WARN_FRACTION * limit or now - self._reported < REPORT_INTERVAL:
            return
        self._reported = now
        advice = "further connections are closed; raise ulimit -n, or lower max_concurrency"
        logger.warning("%d of %d file descriptors are open: %s", number, limit, advice)
