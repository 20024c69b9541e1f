"""Watchdog of the event loop: logs the request and code location that blocked it, and for how long."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from prometheus_client import Counter as Metric

from ..http.request_record import RequestRecord

logger = logging.getLogger(__name__)

MAX_CPU_TIME = 0.05
"""Processor time in seconds above which an iteration of the event loop is logged."""
MAX_WALL_TIME = 1.0
"""Elapsed time in seconds above which an iteration of the event loop is logged."""
REPORT_AFTER = 10.0
"""Elapsed time in seconds after which an iteration is logged before its end, in case it never ends."""
POLL_INTERVAL = 0.02
"""Seconds between checks of the loop thread's processor time."""
PROBE_CPU_TIME = 0.001
"""Processor time in seconds that the loop thread uses before the loop is probed again."""
MAX_PROBE_INTERVAL = 0.25
"""Maximum time between probes in seconds, for a loop that uses no processor time (idle, or blocked in a wait)."""
SAMPLE_INTERVAL = 0.01
"""Seconds between samples of the loop's stack during an iteration."""
MAX_FRAMES = 4
"""Maximum number of frames of this package that are logged, innermost first."""
ROOT = str(Path(__file__).parents[2])


class Watchdog:
    """Watches the running event loop from a thread.

    It measures the processor time of the loop's thread, which excludes time in which other processes run.

    Args:
        holds: counter of the iterations that blocked the loop.
    """

    def __init__(self, holds: Metric) -> None:
        self._holds = holds
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread_id)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        probed_at, cpu_time = time.monotonic(), time.clock_gettime(self._clock)
        while not self._stop.wait(POLL_INTERVAL):
            started, used = time.monotonic(), time.clock_gettime(self._clock)
            if used - cpu_time < PROBE_CPU_TIME and started - probed_at < MAX_PROBE_INTERVAL:
                continue
            answered = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            places: Counter[str] = Counter()
            reported = False
            while not answered.wait(SAMPLE_INTERVAL) and not self._stop.is_set():
                places[self._location()] += 1
                if not reported and (seconds := time.monotonic() - started) > REPORT_AFTER:
                    where = places.most_common(1)[0][0]
                    logger.warning("the event loop has been blocked for %.0f s so far by %s", seconds, where)
                    reported = True
            probed_at, cpu_time = time.monotonic(), time.clock_gettime(self._clock)
            blocked, seconds = cpu_time - used, probed_at - started
            if blocked > MAX_CPU_TIME or seconds > MAX_WALL_TIME:
                self._holds.inc()
                where = places.most_common(1)[0][0] if places else "unknown"
                logger.warning("the event loop was blocked for %.3f s (%.3f s elapsed) by %s", blocked, seconds, where)

    def _location(self) -> str:
        """Describe the request that the loop's thread is handling, and its innermost functions."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        calls: list[str] = []
        request = ""
        while frame is not None:
            code = frame.f_code
            if len(calls) < MAX_FRAMES and (code.co_filename.startswith(ROOT) or not calls):
                calls.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
            if (
                not request
                and "record" in code.co_varnames
                and isinstance(record := frame.f_locals.get("record"), RequestRecord)
            ):
                request = f"request {record.request_id} ({record.path}), "
            frame = frame.f_back
        return f"{request}in {' < '.join(calls)}"
