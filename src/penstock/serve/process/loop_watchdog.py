"""A watchdog of the event loop: logs which request blocked it, for how long, and where in the code."""

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
"""Seconds of processor time of one iteration of the event loop; a longer one is logged."""
MAX_WALL_TIME = 1.0
"""Seconds of one iteration, whatever it waits for; a longer one is logged."""
REPORT_AFTER = 10.0
"""Seconds after which an iteration that lasts is logged; one that does not end is logged no other way."""
POLL_INTERVAL = 0.02
"""Seconds between two looks at the processor time of the loop's thread."""
PROBE_CPU_TIME = 0.001
"""Seconds of processor time since the last probe of the loop after which it is probed again."""
MAX_PROBE_INTERVAL = 0.25
"""Seconds between two probes of a loop that takes no processor time: it waits for clients, or for something else."""
SAMPLE_INTERVAL = 0.01
"""Seconds between two samples of the loop's stack while an iteration lasts."""
MAX_FRAMES = 4
"""Innermost frames of this package that are logged."""
ROOT = str(Path(__file__).parents[2])


class Watchdog:
    """Watches the running event loop from a thread.

    It measures the processor time of the loop's thread, which does not grow while other processes have the processor.

    Args:
        holds: counter of the blocked iterations, which are logged.
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
                places[self._where()] += 1
                if not reported and (seconds := time.monotonic() - started) > REPORT_AFTER:
                    where = places.most_common(1)[0][0]
                    logger.warning("the event loop has been held for %.0f s, and still is, by %s", seconds, where)
                    reported = True
            probed_at, cpu_time = time.monotonic(), time.clock_gettime(self._clock)
            held, seconds = cpu_time - used, probed_at - started
            if held > MAX_CPU_TIME or seconds > MAX_WALL_TIME:
                self._holds.inc()
                where = places.most_common(1)[0][0] if places else "unknown"
                logger.warning("the event loop was held for %.3f s (%.3f s in all) by %s", held, seconds, where)

    def _where(self) -> str:
        """The request that the loop's thread is handling, and the functions that it is in."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        calls: list[str] = []
        who = ""
        while frame is not None:
            code = frame.f_code
            if len(calls) < MAX_FRAMES and (code.co_filename.startswith(ROOT) or not calls):
                calls.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
            if (
                not who
                and "record" in code.co_varnames
                and isinstance(record := frame.f_locals.get("record"), RequestRecord)
            ):
                who = f"request {record.request_id} ({record.path}), "
            frame = frame.f_back
        return f"{who}in {' < '.join(calls)}"
