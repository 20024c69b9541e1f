"""The launcher of an engine process: starts it, restarts it when it dies or hangs, and stops it."""

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
MEMORY_MARGIN = 0.1
"""Share of an engine's memory that must be free in addition for a second engine."""
OTHER_VERSION = "the installed version of Penstock needs a restart of the whole server"
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
        self.weights = ""
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
        self._fallback = ""
        """Weights of the next process if a process that is restarted on purpose cannot load ``weights``."""
        self._loaded = asyncio.Event()
        """Cleared by ``unload`` until ``load`` has started the next process."""
        self._loaded.set()
        self._launching = asyncio.Lock()
        """Held by each change of ``_process`` after ``start``: one process at a time uses ``address``."""
        self.is_lost = False
        """True if the process has died too often, and is not restarted."""
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
        try:
            await self._watch()
        finally:
            self._end_restart(PenstockError(Code.UNAVAILABLE, f"{self._name} is stopping or has died too often"))

    async def _watch(self) -> None:
        while self._process is not None:
            hang_watch = asyncio.create_task(self._kill_if_hung(self._process))
            status = await self._process.wait()
            hang_watch.cancel()
            self.ready = None
            if not self._loaded.is_set():
                await self._loaded.wait()
                if not self.closing:
                    continue  # ``load`` has started the next process
            if self.closing or not (self.restarts or status):
                return
            if self._restarting:
                self._suspects = []
                try:
                    self._end_restart(await self._relaunch(self._fallback))
                except PenstockError as error:
                    logger.error("%s could not be restarted: %s", self._name, error)
                    self._end_restart(error)
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
                self.is_lost = True
                return
            try:
                await self._relaunch("" if self.options.data_parallel_size == 1 else None)
            except PenstockError as error:
                logger.error("%s could not be restarted: %s", self._name, error)

    def _end_restart(self, error: PenstockError | None) -> None:
        if self._restarting:
            self._restarting.set_result(error)
            self._restarting = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "start it first"
        return self._process.pid

    @property
    def fits_successor(self) -> bool:
        """True if the next process can start next to this one: it needs no port or GPU of this one, and there is memory
        for a second copy of weights and KV cache."""
        options = self.options
        shares = options.engine_address or options.role != "mixed" or options.nnodes > 1
        if self.ready is None or shares or options.distributed_executor_backend == "ray":
            return False
        return 0 < (1 + MEMORY_MARGIN) * self.ready.host_bytes < free_host_bytes()

    def successor(self, weights: str) -> EngineProcess:
        """An engine with the same options and KV cache that is not started yet, with a separate address."""
        options = self.options
        if self.ready:
            options = msgspec.structs.replace(options, num_gpu_blocks_override=self.ready.num_allocated_blocks)
        engine = EngineProcess(options, self._logs, self._replica)
        engine.weights = weights
        return engine

    async def restart(self, weights: str, drain: bool) -> None:
        """Stop the process, and wait until ``watch`` has started the next one at the same address. Its requests
        continue there.

        Args:
            weights: folder of the weights to load.
            drain: its requests get ``drain_timeout`` to end before, as they cannot continue in the next process. They
                also get it if a start takes more than half of ``resume_timeout``.

        Raises ``PenstockError`` if the next process cannot load the weights, and has the current ones again, or does
        not start; ``watch`` then tries again.
        """
        if self._process is None or self.is_lost or self._restarting or self.closing:  # ``watch`` would not start it
            raise PenstockError(Code.UNAVAILABLE, f"{self._name} is not running, or is being restarted; try again soon")
        drain = drain or self._start_seconds > self.options.resume_timeout / 2
        self._restarting = asyncio.get_running_loop().create_future()
        self._fallback, self.weights = self.weights, weights
        restarting = self._restarting
        timeout = self._drain_timeout * drain + EXIT_TIMEOUT
        await terminate(self._process, timeout, signal.SIGTERM if drain else signal.SIGUSR1)
        if error := await asyncio.shield(restarting):
            raise error

    async def unload(self) -> None:
        """End the process, which has no requests, until ``load``; also one that ``watch`` is starting."""
        self._loaded.clear()
        async with self._launching:
            assert self._process is not None
            await terminate(self._process, self._drain_timeout + EXIT_TIMEOUT)

    async def load(self) -> messages.Ready:
        """Start the process again after ``unload``. Raises ``PenstockError`` if it cannot start; it is then still
        unloaded."""
        if self.closing or not self.restarts:
            raise PenstockError(Code.UNAVAILABLE, "the server is stopping")
        self._suspects = []
        async with self._launching:
            ready = await self._launch()
        self._loaded.set()
        return ready

    async def close(self) -> int:
        """Stop the engine once its open requests have ended, or at once if it is starting. Returns its exit status."""
        self.closing = True
        self._loaded.set()
        status = 0
        if self._process is not None:
            status = await terminate(self._process, self._drain_timeout + EXIT_TIMEOUT, self._end_signal)
        self._heartbeat.close()
        self._step_record.close()
        self._folder.close()
        return status

    @property
    def _end_signal(self) -> signal.Signals:
        """Signal that ends the engine after its open requests, or at once if it is starting."""
        return signal.SIGTERM if self.ready else signal.SIGKILL

    def stop(self) -> None:
        """Begin to stop the engine as ``close`` does, without waiting for its end."""
        self.closing = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(self._end_signal)

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

    async def _relaunch(self, fallback: str | None) -> PenstockError | None:
        """Start the next process.

        Args:
            fallback: folder of weights to load if the process cannot read ``weights``; empty: the option ``model``;
                None: no fallback, since the weights of all replicas must be equal.

        Returns the error if the process was started with the weights of ``fallback``. Raises ``PenstockError`` if it
        cannot start. Does nothing after ``unload``.
        """
        async with self._launching:
            return await self._launch_or_fall_back(fallback) if self._loaded.is_set() else None

    async def _launch_or_fall_back(self, fallback: str | None) -> PenstockError | None:
        """``_relaunch``, while ``_launching`` is held."""
        try:
            await self._launch()
            return None
        except PenstockError as error:
            unavailable = error.failure.code is Code.UNAVAILABLE
            if fallback is None or self.weights == fallback or unavailable or self.closing:
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
        # a separate session: Ctrl-C in a terminal is for this process
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        self._process = process
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
        try:
            report: messages.StartReport = messages.decode_start_report(line)
        except msgspec.MsgspecError as error:  # another version of Penstock was installed meanwhile
            process.kill()
            await process.wait()
            raise PenstockError(Code.UNSUPPORTED, f"{OTHER_VERSION} ({error})") from error
        if isinstance(report, messages.StartFailed):
            await process.wait()
            raise PenstockError.of(report.failure)
        self.ready, self._start_seconds = report, time.monotonic() - started
        # After a restart, the engine must have the same port, even if the system has chosen it (port 0).
        self.options = msgspec.structs.replace(self.options, engine_address=report.engine_address)
        return report


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
