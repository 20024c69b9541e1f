"""Supervision of API processes: start, restart, and exchange of messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import INTERNAL
from penstock.engine.exit_status import exit_reason
from penstock.engine.service.launcher import DEATH_WINDOW, MAX_DEATHS, RestartLimit, terminate

from ..models.messages import (
    EXIT_MISCONFIGURED,
    Alive,
    ApiProcessStart,
    Done,
    Drained,
    Failed,
    Models,
    Ready,
    Request,
    decode_from_api_process,
    encode_line,
)

logger = logging.getLogger("penstock")

STOPPING = Failure(Code.UNAVAILABLE, "the server is stopping")


class ApiProcess:
    """One API process."""

    def __init__(self, process: Process) -> None:
        self.os_process = process
        self.last_alive = 0.0
        """Time of the last ``Alive`` message, on the monotonic clock; 0 before the first message."""
        self.ready: set[str] = set()
        """Addresses of engines with models that this process serves; contains "" once it accepts requests."""
        self.failed: dict[str, Failure] = {}
        """Reason why this process cannot serve the model of an engine, by engine address."""
        self.drained: set[str] = set()
        """Addresses of engines being unloaded for which this process has no open requests."""

    def send(self, message: msgspec.Struct) -> None:
        assert self.os_process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process has just exited
            self.os_process.stdin.write(encode_line(message))


class ApiProcesses:
    """All API processes.

    Args:
        starts: the first message to each process.
        handle: executes a request of a process; raises ``PenstockError`` if it fails.
    """

    def __init__(self, starts: Sequence[ApiProcessStart], handle: Callable[[Request], Awaitable[None]]) -> None:
        self._starts = starts
        self._handle = handle
        self._processes: dict[int, ApiProcess] = {}
        self._models = Models(())
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.misconfigured = False
        """True if a process exited because of its configuration: a restart would not help."""

    async def run(self) -> None:
        """Run the processes. Returns when a process has exceeded its restart limit or is misconfigured."""
        tasks = [asyncio.create_task(self._run(start)) for start in self._starts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()

    def set_models(self, models: Models) -> None:
        """Send the models to all processes, and later to each restarted process."""
        self._models = models
        for process in self._processes.values():
            process.send(models)

    async def wait_ready(self, engine: str = "") -> None:
        """Wait until every process serves the model of the engine with this address; if empty, until every process
        accepts requests.

        Raises ``PenstockError`` if a process cannot serve the model.
        """

        def ready() -> bool:
            for process in self._processes.values():
                if failure := process.failed.get(engine):
                    raise PenstockError.of(failure)
            return len(self._processes) == len(self._starts) and all(
                engine in process.ready for process in self._processes.values()
            )

        async with self._changed:
            await self._changed.wait_for(ready)

    async def wait_drained(self, engine: str) -> None:
        """Wait until no process has an open request for the model of the engine with this address."""
        async with self._changed:
            await self._changed.wait_for(lambda: all(engine in process.drained for process in self._processes.values()))

    def forget_drained(self, engine: str) -> None:
        """Forget that processes had no open request for the model of an engine, before ``wait_drained``."""
        for process in self._processes.values():
            process.drained.discard(engine)

    async def close(self, timeout: float) -> None:
        """Stop the processes, and kill them after ``timeout`` seconds. Loads and unloads in progress are cancelled."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(terminate(process.os_process, timeout) for process in self._processes.values()))

    def kill(self) -> None:
        """Kill the processes immediately."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.os_process.kill()

    async def _run(self, start: ApiProcessStart) -> None:
        """Run one process and restart it when it exits. Returns when it has exceeded the restart limit."""
        restart_limit = RestartLimit()
        while True:
            process = self._processes[start.number] = await _launch(start)
            process.send(self._models)
            hang_watch = asyncio.create_task(self._kill_if_hung(process, start.options.api_process_timeout))
            await self._listen(process)
            status = await process.os_process.wait()
            hang_watch.cancel()
            if status == EXIT_MISCONFIGURED:
                self.misconfigured = True
                return
            if self._closing:
                await asyncio.Event().wait()
            del self._processes[start.number]
            await self._notify()
            _drop_metrics(start.number)
            logger.error(
                "API process %d (process %d) ended: %s", start.number, process.os_process.pid, exit_reason(status)
            )
            restart_limit.record_exit()
            if restart_limit.is_exceeded:
                message = "API process %d has died %d times within %d seconds and is not restarted"
                logger.error(message, start.number, MAX_DEATHS, DEATH_WINDOW)
                return

    async def _listen(self, process: ApiProcess) -> None:
        """Handle a process's messages until it closes its pipe."""
        assert process.os_process.stdout is not None
        while message := await process.os_process.stdout.readline():
            match decode_from_api_process(message):
                case Alive():
                    process.last_alive = time.monotonic()
                case Ready(engine):
                    process.ready.add(engine)
                    await self._notify()
                case Failed(engine, failure):
                    process.failed[engine] = failure
                    await self._notify()
                case Drained(engine):
                    process.drained.add(engine)
                    await self._notify()
                case request:
                    task = asyncio.create_task(self._answer(process, request))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _kill_if_hung(self, process: ApiProcess, timeout: float) -> None:
        """Kill a process if its event loop has not run for ``timeout`` seconds; 0: never."""
        interval = min(timeout / 4, 1.0)
        last_check = since = time.monotonic()
        while timeout:
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - last_check > 2 * interval + 1:
                since = now  # the machine was suspended or overloaded: count from now
            last_check = now
            if process.last_alive and not self._closing and now - max(process.last_alive, since) > timeout:
                pid = process.os_process.pid
                message = "API process (process %d) has not answered for %g seconds: killed (api_process_timeout)"
                logger.error(message, pid, timeout)
                process.os_process.kill()
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _answer(self, process: ApiProcess, request: Request) -> None:
        failure = None
        try:
            if self._closing:
                raise PenstockError.of(STOPPING)
            await self._handle(request)
        except PenstockError as error:
            failure = error.failure
        except asyncio.CancelledError:
            failure = STOPPING
        except Exception:
            logger.exception("%s: %s failed", request.name, type(request).__name__.lower())
            failure = INTERNAL
        process.send(Done(request.number, failure))


async def _launch(start: ApiProcessStart) -> ApiProcess:
    command = [sys.executable, "-P", "-m", "penstock.serve.process.api_process"]
    pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "pass_fds": start.sockets}
    process = ApiProcess(  # a separate session: Ctrl-C in a terminal is for the supervisor
        await asyncio.create_subprocess_exec(*command, start_new_session=True, **pipes)
    )
    process.send(start)
    return process


def _drop_metrics(number: int) -> None:
    """Remove an exited process's gauges (open requests) from the shared metrics. Its successor keeps its counters."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(number)
