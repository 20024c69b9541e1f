"""The engine process as its owner sees it: started, watched, started again when it dies, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from pathlib import Path

import msgspec

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, PenstockError

from ..exit_status import in_words
from . import wire
from .heartbeat import Heartbeat

logger = logging.getLogger(__name__)

MOST_DEATHS, WITHIN = 3, 60.0
"""A process that dies so often within so many seconds is not started again."""
TO_END = 10.0
"""Seconds beyond the time to drain after which an engine that does not end is killed."""


class Deaths:
    """Counts deaths, to tell an accident from a process that cannot live."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST_DEATHS)

    def too_many(self) -> bool:
        """One more death; whether there have been too many."""
        self._times.append(time.monotonic())
        return len(self._times) == MOST_DEATHS and self._times[-1] - self._times[0] < WITHIN


class EngineProcess:
    """Owns an engine process, which clients reach at ``address``."""

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None) -> None:
        self._start = msgspec.json.encode(wire.Start(options, logs or LogOptions(), os.getpid()))
        self._drain_timeout = options.drain_timeout
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self.address = f"ipc://{self._folder}/engine"
        self._patience = options.engine_iteration_timeout
        self._heartbeat = Heartbeat(self.address)
        self._process: Process | None = None
        self._deaths = Deaths()
        self.ready: wire.Ready | None = None
        """What serves now; None while it starts."""
        self.closing = False
        """Whether it was told to end."""

    async def start(self) -> wire.Ready:
        """Start the process and wait until its model has loaded.

        Raises ``PenstockError`` with the engine's own words where it cannot start.
        """
        try:
            return await self._launch()
        except BaseException:
            await self.close()
            raise

    async def watch(self) -> None:
        """Start it again whenever it dies; returns when it is closed, or has died too often."""
        while self._process is not None:
            guard = asyncio.create_task(self._guard(self._process))
            status = await self._process.wait()
            guard.cancel()
            self.ready = None
            if self.closing:
                return
            logger.error("the engine (process %d) ended: %s", self._process.pid, in_words(status))
            if self._deaths.too_many():
                logger.error("it has died %d times within %d seconds and is not started again", MOST_DEATHS, WITHIN)
                return
            try:
                await self._launch()
            except PenstockError as error:
                logger.error("the engine could not be started again: %s", error)

    @property
    def pid(self) -> int:
        assert self._process is not None, "start it first"
        return self._process.pid

    async def close(self) -> int:
        """Stop the engine, which lets what runs come to its end unless it is still starting; returns its status."""
        self.closing = True
        status = 0
        if self._process is not None:
            status = await end(self._process, self._drain_timeout + TO_END, kill=self.ready is None)
        self._heartbeat.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return status

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _guard(self, process: Process) -> None:
        """Kill an engine whose loop does not come round any more: its clients then hear so at once."""
        if not self._patience:
            return
        tick = min(self._patience / 4, 1.0)
        looked = since = time.monotonic()
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - looked > 2 * tick + 1:
                since = now  # this process was held up, and so may the engine have been
            looked = now
            if self.ready and not self.closing and min(self._heartbeat.overdue, now - since) > self._patience:
                age = self._heartbeat.age
                logger.error("the engine (process %d) has not answered for %.0f seconds: killed", process.pid, age)
                process.kill()
                return

    async def _launch(self) -> wire.Ready:
        command = [sys.executable, "-m", "penstock.engine.service.server", self.address]
        self._heartbeat.reset()
        self._process = process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._start)
        process.stdin.close()
        line = await process.stdout.readline()
        if not line:
            status = await process.wait()
            raise PenstockError(Code.UNAVAILABLE, f"the engine ended before it was ready: {in_words(status)}")
        report: wire.Report = wire.decode_report(line)
        if isinstance(report, wire.Broken):
            await process.wait()
            raise PenstockError.of(report.failure)
        self.ready = report
        return report


async def end(process: Process, patience: float, kill: bool = False) -> int:
    """Have a process end, by force after ``patience`` seconds or at once; returns its exit status."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
    try:
        return await asyncio.wait_for(process.wait(), patience)
    except TimeoutError:
        logger.error("process %d does not end and is killed", process.pid)
        process.kill()
        return await process.wait()
