"""A watchdog over the event loop: logs which request held it up, for how long, and where in the code."""

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

HOLD = 0.05
"""Seconds of processor time after which one iteration of the event loop is logged."""
BLOCKED = 1.0
"""Seconds after which it is logged whatever it waited for."""
LOOK = 0.02
"""Seconds between two looks."""
SAMPLE = 0.01
"""Seconds between two looks at the stack of an iteration that takes long."""
FRAMES = 4
"""Innermost calls of ours that are logged."""
ROOT = str(Path(__file__).parents[2])


class Watchdog:
    """Watches the event loop that it is made in, from a thread.

    The bound is on processor time of the loop's thread, so that other processes' work is not taken for ours.

    Args:
        holds: counts what is logged.
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
        while not self._stop.wait(LOOK):
            answered = threading.Event()
            begun, used = time.monotonic(), time.clock_gettime(self._clock)
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # it is closed
                return
            places: Counter[str] = Counter()
            while not answered.wait(SAMPLE) and not self._stop.is_set():
                places[self._where()] += 1
            held, seconds = time.clock_gettime(self._clock) - used, time.monotonic() - begun
            if held > HOLD or seconds > BLOCKED:
                self._holds.inc()
                where = places.most_common(1)[0][0] if places else "unknown"
                logger.warning("the event loop was held for %.3f s (%.3f s in all) by %s", held, seconds, where)

    def _where(self) -> str:
        """Which request the loop's thread is at, and in which functions."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        calls: list[str] = []
        who = ""
        while frame is not None:
            code = frame.f_code
            if len(calls) < FRAMES and (code.co_filename.startswith(ROOT) or not calls):
                calls.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
            if (
                not who
                and "record" in code.co_varnames
                and isinstance(record := frame.f_locals.get("record"), RequestRecord)
            ):
                who = f"request {record.request_id} ({record.path}), "
            frame = frame.f_back
        return f"{who}in {' < '.join(calls)}"
