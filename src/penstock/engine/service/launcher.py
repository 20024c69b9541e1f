"""The launcher of engine processes: starts them, restarts them when they die or hang, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from penstock.config.addresses import join_address, split_address
from penstock.config.options import EngineOptions, LogOptions
from penstock.config.temporary_folder import TemporaryFolder
from penstock.core import Code, PenstockError
from penstock.planning.host_memory import free_host_bytes

from ..exit_status import exit_reason
from . import messages
from .heartbeat import Heartbeat
from .step_record import StepRecord

logger = logging.getLogger(__name__)

MAX_DEATHS, DEATH_WINDOW = 3, 60.0
"""A process that dies ``MAX_DEATHS`` times within ``DEATH_WINDOW`` seconds is not restarted."""
EXIT_TIMEOUT = 10.0
"""Seconds after ``drain_timeout`` until an engine that has not exited is killed."""


class RestartLimit:
    """Limits restarts of a process that dies repeatedly."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_DEATHS)

    def record_exit(self) -> None:
        """Record that the process has died."""
        self._times.append(time.monotonic())

    @property
    def is_exceeded(self) -> bool:
        """True if the process has died too often to be restarted."""
        return len(self._times) == MAX_DEATHS and self._times[-1] - self._times[0] < DEATH_WINDOW


class EngineProcess:
    """Starts, watches and stops an engine process, which serves clients at ``address``.

    Args:
        replica: index of the data-parallel replica.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None, replica: int = 0) -> None:
        self.options = _with_replica_port(options, replica)
        """Options of the next process to start."""
        self._logs = logs or LogOptions()
        self._replica = replica
        self._name = f"engine {replica}" if options.data_parallel_size > 1 else "the engine"
        self.weights = self._previous_weights = ""
        """Folder of the weights that the next process loads; empty: the option ``model``."""
        self._drain_timeout = options.drain_timeout
        self._folder = TemporaryFolder()
        self.address = f"ipc://{self._folder.path}/engine"
        self._iteration_timeout = options.engine_iteration_timeout
        self._heartbeat = Heartbeat(self.address)
        self._step_record = StepRecord(self.address)
        self._suspects: list[int] = []
        """Requests in the fatal step of the last process."""
        self._process: Process | None = None
        self._start_seconds = 0.0
        """Duration of the last start."""
        self._restarting: asyncio.Future[PenstockError | None] | None = None
        """Set while the process is restarted on purpose; done with the error or None once the next one was started."""
        self._restart_limit = RestartLimit()
        self.ready: messages.Ready | None = None
        """Report of the running engine; None while it starts."""
        self.closing = False
        """True after ``close`` was called."""
        self.restarts = True
        """True if ``watch`` restarts the process when it ends."""

    async def start(self) -> messages.Ready:
        """Start the process and wait until it has loaded the model. Raises ``PenstockError`` if it cannot start."""
        try:
            return await self._launch()
        except BaseException:
            await self.close()
            raise

    async def watch(self) -> None:
        """Restart the process whenever it dies or hangs. Returns after ``close``, when the process has died too often,
        or when it ends while ``restarts`` is False."""
        while self._process is not None:
            hang_watch = asyncio.create_task(self._kill_if_hung(self._process))
            status = await self._process.wait()
            hang_watch.cancel()
            self.ready = None
            if self.closing or not (self.restarts or status):
                return
            if (restarting := self._restarting) and not restarting.done():
                self._suspects = []
                try:
                    restarting.set_result(await self._relaunch(self._previous_weights))
                except PenstockError as error:
                    logger.error("%s could not be restarted: %s", self._name, error)
                    restarting.set_result(error)
                continue
            logger.error("%s (process %d) ended: %s", self._name, self._process.pid, exit_reason(status))
            if not self.restarts:
                return
            self._suspects = list(self._step_record.read(self._process.pid))
            if not self._step_record.has_repeated(self._process.pid):  # a suspect explains the death, and fails soon
                self._restart_limit.record_exit()
            if self._restart_limit.is_exceeded:
                message = "%s has died %d times within %d seconds and is not restarted"
                logger.error(message, self._name, MAX_DEATHS, DEATH_WINDOW)
                return
            try:
                await self._relaunch()
            except PenstockError as error:
                logger.error("%s could not be restarted: %s", self._name, error)

    @property
    def pid(self) -> int:
        assert self._process is not None, "start it first"
        return self._process.pid

    @property
    def can_run_twice(self) -> bool:
        """True if a second process can run next to this one: there is memory for its weights and KV cache, and both
        share no GPU and no port."""
        options = self.options
        shares = options.engine_address or options.role != "mixed" or options.nnodes > 1
        if self.ready is None or shares or options.distributed_executor_backend == "ray":
            return False
        return 0 < self.ready.host_bytes < free_host_bytes()

    def successor(self, weights: str) -> EngineProcess:
        """An engine with the same options and KV cache that is not started yet, with an address of its own."""
        assert self.ready is not None
        options = msgspec.structs.replace(self.options, num_gpu_blocks_override=self.ready.num_blocks)
        engine = EngineProcess(options, self._logs, self._replica)
        engine.weights = weights
        return engine

    async def restart(self, weights: str) -> None:
        """Stop the process, and wait until ``watch`` has started the next one at the same address. Its requests
        continue there if a start takes at most half of ``resume_timeout``; otherwise they get ``drain_timeout`` to end.

        Args:
            weights: folder of the weights to load.

        Raises ``PenstockError`` if the next process cannot load them, and has the current weights again, or does not
        start; ``watch`` then tries again.
        """
        assert self._process is not None
        assert self._restarting is None
        options = self.options
        drains = not options.resume or self._start_seconds > options.resume_timeout / 2
        self._restarting = asyncio.get_running_loop().create_future()
        self._previous_weights, self.weights = self.weights, weights
        try:
            timeout = self._drain_timeout * drains + EXIT_TIMEOUT
            await terminate(self._process, timeout, signal.SIGTERM if drains else signal.SIGUSR1)
            error = await self._restarting
        finally:
            self._restarting = None
        if error:
            raise error

    async def close(self) -> int:
        """Stop the engine once its open requests have ended, or at once if it is starting. Returns its exit status."""
        self.closing = True
        status = 0
        if self._process is not None:
            number = signal.SIGTERM if self.ready else signal.SIGKILL
            status = await terminate(self._process, self._drain_timeout + EXIT_TIMEOUT, number)
        if self._restarting and not self._restarting.done():
            self._restarting.set_result(PenstockError(Code.UNAVAILABLE, "the server is stopping"))
        self._heartbeat.close()
        self._step_record.close()
        self._folder.close()
        return status

    def kill(self) -> None:
        """Kill the engine process. Does nothing if it is not running."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _kill_if_hung(self, process: Process) -> None:
        """Kill the engine when its heartbeat is overdue by ``engine_iteration_timeout``. Clients detect its end at
        once."""
        if not self._iteration_timeout:
            return
        interval = min(self._iteration_timeout / 4, 1.0)
        last_check = since = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - last_check > 2 * interval + 1:
                since = now  # the machine was suspended or overloaded: count the engine's delay from now
            last_check = now
            if self.ready and not self.closing and min(self._heartbeat.overdue, now - since) > self._iteration_timeout:
                message = "%s (process %d) has not answered for %.0f seconds: killed"
                logger.error(message, self._name, process.pid, self._heartbeat.age)
                process.kill()
                return

    async def _relaunch(self, fallback: str = "") -> PenstockError | None:
        """Start the next process. If it cannot read its weights, start it with those of ``fallback`` (empty: the option
        ``model``) and return the error, unless there are other replicas, whose weights must be equal. Raises
        ``PenstockError``."""
        try:
            await self._launch()
            return None
        except PenstockError as error:
            unavailable = error.failure.code is Code.UNAVAILABLE
            if self.weights == fallback or self.options.data_parallel_size > 1 or unavailable:
                raise
            message = "%s cannot start with the weights of %s: %s; starting with the weights of %s"
            logger.error(message, self._name, self.weights, error, fallback or "the option model")
            self.weights = fallback
            await self._launch()
            return error

    async def _launch(self) -> messages.Ready:
        started = time.monotonic()
        command = [sys.executable, "-P", "-m", "penstock.engine.service.server", self.address]
        self._heartbeat.reset()
        self._process = process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        start = messages.Start(self.options, self._logs, os.getpid(), self._replica, self.weights, self._suspects)
        process.stdin.write(msgspec.json.encode(start))
        process.stdin.close()
        line = await process.stdout.readline()
        if not line:
            status = await process.wait()
            reason = f"{exit_reason(status)}; the log has the cause"
            raise PenstockError(Code.UNAVAILABLE, f"the engine ended before it was ready: {reason}")
        report: messages.StartReport = messages.decode_start_report(line)
        if isinstance(report, messages.StartFailed):
            await process.wait()
            raise PenstockError.of(report.failure)
        self.ready, self._start_seconds = report, time.monotonic() - started
        # After a restart, the engine must have the same port, even if the system has chosen it (port 0).
        self.options = msgspec.structs.replace(self.options, engine_address=report.engine_address)
        return report


class EngineProcesses:
    """Starts, watches and stops the engine processes of a model, one per data-parallel replica.

    The first process determines the size of its KV cache from the free memory, of which each replica gets an equal
    share. The other processes, and all restarted processes, use the same number of blocks.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None) -> None:
        self._engines = [EngineProcess(options, logs, replica) for replica in range(options.data_parallel_size)]
        self._replaced: list[EngineProcess] = []
        """Engines that finish their requests after they were replaced."""
        self._replacing = asyncio.Lock()

    @property
    def addresses(self) -> tuple[str, ...]:
        """ZeroMQ addresses of the engines."""
        return tuple(engine.address for engine in self._engines)

    @property
    def weights(self) -> str:
        """Folder of the weights that the next processes load; empty: the option ``model``."""
        return self._engines[0].weights

    @weights.setter
    def weights(self, folder: str) -> None:
        for engine in self._engines:
            engine.weights = folder

    @property
    def reports(self) -> list[messages.Ready]:
        """Reports of the running engines, in order of the replica."""
        return [engine.ready for engine in self._engines if engine.ready]

    @property
    def closing(self) -> bool:
        """True after ``close`` was called."""
        return self._engines[0].closing

    async def start(self) -> messages.Ready:
        """Start the processes and wait until they have loaded the model. Returns the report of the first process.
        Raises ``PenstockError`` if a process cannot start."""
        first, *others = self._engines
        try:
            ready = await first.start()
            if others:
                for engine in self._engines:
                    engine.options = msgspec.structs.replace(engine.options, num_gpu_blocks_override=ready.num_blocks)
                await asyncio.gather(*(engine.start() for engine in others))
        except BaseException:
            await self.close()
            raise
        return ready

    async def watch(self) -> None:
        """Restart processes that die or hang. Returns after ``close``, or when all processes have died too often."""
        await asyncio.gather(*map(self._watch, range(len(self._engines))))

    async def _watch(self, replica: int) -> None:
        while True:
            engine = self._engines[replica]
            await engine.watch()
            async with self._replacing:
                if engine is self._engines[replica]:
                    return

    async def replace(self, replica: int, weights: str, on_started: Callable[[], Awaitable[None]]) -> None:
        """Replace an engine process by a new one: next to it, with another address, if memory allows, otherwise after
        it, at the same address.

        Args:
            weights: folder of the weights that the new process loads; empty: the option ``model``.
            on_started: called with the new process's address in ``addresses``; returns when all clients use it. The old
                process then finishes the requests that it still has within ``drain_timeout``.

        Raises ``PenstockError`` if the new process cannot start. The old one then remains, unless it had to end before.
        """
        async with self._replacing:
            old = self._engines[replica]
            if not old.can_run_twice:
                await old.restart(weights)
                return
            new = old.successor(weights)
            ready = await new.start()
            if ready.protocol != messages.PROTOCOL:
                await new.close()
                message = f"Penstock {ready.version} is installed now, which needs a restart of the whole server"
                raise PenstockError(Code.UNSUPPORTED, message)
            self._engines[replica] = new
            self._replaced.append(old)
            try:
                await on_started()
            finally:
                await old.close()
                self._replaced.remove(old)

    async def close(self) -> int:
        """Stop the engines (see ``EngineProcess.close``). Returns the first exit status that is not 0, or 0."""
        statuses = await asyncio.gather(*(engine.close() for engine in [*self._engines, *self._replaced]))
        return next((status for status in statuses if status), 0)

    def stop_restarting(self) -> None:
        """Do not restart processes: on shutdown, a service manager may send SIGTERM to all processes of the group."""
        for engine in self._engines:
            engine.restarts = False

    def kill(self) -> None:
        """Kill all engine processes of the model."""
        for engine in [*self._engines, *self._replaced]:
            engine.kill()

    def pid(self, replica: int) -> int:
        """Process id of a replica."""
        return self._engines[replica].pid

    def restart(self, replica: int) -> None:
        """Kill a process. ``watch`` then restarts it."""
        self._engines[replica].kill()


def _with_replica_port(options: EngineOptions, replica: int) -> EngineOptions:
    """Return the options with the ``engine_address`` of a data-parallel replica: its index is added to the port."""
    if not options.engine_address or not replica:
        return options
    host, port = split_address(options.engine_address, "engine_address")
    return msgspec.structs.replace(options, engine_address=join_address(host, port + replica if port else 0))


async def terminate(process: Process, timeout: float, number: signal.Signals = signal.SIGTERM) -> int:
    """Terminate a process and return its exit status.

    Args:
        timeout: seconds after the signal until the process is killed.
        number: signal that ends the process.
    """
    with contextlib.suppress(ProcessLookupError):  # the process has exited already
        process.send_signal(number)
    try:
        async with asyncio.timeout(timeout):
            return await process.wait()
    except TimeoutError:
        logger.error("process %d has not ended within %g seconds: killed", process.pid, timeout)
        process.kill()
        return await process.wait()
