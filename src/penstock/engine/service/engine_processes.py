"""The engine processes of a model: started, watched, replaced and stopped together."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable

import msgspec

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, PenstockError

from . import messages
from .launcher import OTHER_VERSION, EngineProcess

VERSIONS = (
    "import json, importlib.metadata as m; from penstock.engine.service.messages import PROTOCOL; "
    "from penstock.version import __version__ as v; print(json.dumps([PROTOCOL, v, m.version('torch')]))"
)
"""Program that prints protocol, version of Penstock and version of PyTorch that a new engine process would have."""


class EngineProcesses:
    """Starts, watches and stops the engine processes of a model, one per data-parallel replica.

    The first process determines the size of its KV cache from the free memory, of which each replica gets an equal
    share. The other processes, and all restarted processes, use the same number of blocks.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None) -> None:
        self.options = options
        self._engines = [EngineProcess(options, logs, replica) for replica in range(options.data_parallel_size)]
        self._others: list[EngineProcess] = []
        """Engines that start as successors, or finish their requests after they were replaced."""
        self._watches: dict[EngineProcess, asyncio.Task[None]] = {}
        self._replacing = asyncio.Lock()
        self.closing = False
        """True after ``close`` was called."""

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

    def weights_of(self, replica: int) -> str:
        """Folder of the weights that the next process of a replica loads."""
        return self._engines[replica].weights

    @property
    def reports(self) -> list[messages.Ready]:
        """Reports of the running engines, in order of the replica."""
        return [engine.ready for engine in self._engines if engine.ready]

    @property
    def all_run(self) -> bool:
        """True if all processes have loaded the model, and none is being restarted."""
        return len(self.reports) == len(self._engines)

    async def start(self) -> messages.Ready:
        """Start the processes and wait until they have loaded the model. Returns the report of the first process.
        Raises ``PenstockError`` if a process cannot start."""
        first, *others = self._engines
        try:
            ready = await first.start()
            if others:
                for engine in self._engines:
                    blocks = ready.num_allocated_blocks
                    engine.options = msgspec.structs.replace(engine.options, num_gpu_blocks_override=blocks)
                await asyncio.gather(*(engine.start() for engine in others))
        except BaseException:
            await self.close()
            raise
        return ready

    async def watch(self) -> None:
        """Restart processes that die or hang. Returns after ``close``, or when all processes have died too often."""
        while True:
            for engine in self._engines:
                self._watch(engine)
            watches = [self._watches[engine] for engine in self._engines]
            await asyncio.gather(*watches)
            async with self._replacing:  # a successor may be starting
                if all(self._watches.get(engine) in watches for engine in self._engines):
                    return

    def _watch(self, engine: EngineProcess) -> None:
        if engine not in self._watches:
            self._watches[engine] = asyncio.create_task(engine.watch())

    async def replace(
        self, replica: int, weights: str, continues: bool, on_started: Callable[[], Awaitable[None]]
    ) -> None:
        """Replace an engine process by a new one: next to it, with another address, if memory allows, otherwise after
        it, at the same address.

        Args:
            weights: folder of the weights that the new process loads; empty: the option ``model``.
            continues: True if requests may continue in the new process, if it computes the same bits.
            on_started: called with the new process's address in ``addresses``; returns when all clients use it. The old
                process then finishes the requests that it still has within ``drain_timeout``.

        Raises ``PenstockError`` if the new process cannot start. The old one then remains, unless it had to end before.
        """
        async with self._replacing:
            old = self._engines[replica]
            same_version = await _check_versions(old.ready)
            if old.fits_successor or old.is_lost:
                await self._start_successor(replica, weights, on_started)
            else:
                invariant = old.ready is not None and old.ready.batch_invariant
                await old.restart(weights, drain=not (continues and same_version and invariant))

    async def _start_successor(self, replica: int, weights: str, on_started: Callable[[], Awaitable[None]]) -> None:
        old = self._engines[replica]
        new = old.successor(weights)
        self._others.append(new)
        try:
            await new.start()
        finally:
            self._others.remove(new)
        if self.closing:
            await new.close()
            raise PenstockError(Code.UNAVAILABLE, "the server is stopping")
        self._engines[replica] = new
        self._others.append(old)
        self._watch(new)
        try:
            await on_started()
        finally:
            await old.close()
            self._others.remove(old)
            self._watches.pop(old, None)

    async def restart(self, replica: int, weights: str) -> None:
        """Restart a process after it has finished its requests. Raises ``PenstockError`` if it does not start."""
        await self._engines[replica].restart(weights, drain=True)

    async def close(self) -> int:
        """Stop the engines (see ``EngineProcess.close``). Returns the first exit status that is not 0, or 0."""
        self.closing = True
        statuses = await asyncio.gather(*(engine.close() for engine in [*self._engines, *self._others]))
        return next((status for status in statuses if status), 0)

    async def unload(self) -> None:
        """End the processes, which have no requests, until ``load``."""
        await asyncio.gather(*(engine.unload() for engine in self._engines))

    async def load(self) -> messages.Ready:
        """Start the processes again after ``unload``. Returns the report of the first process. Raises ``PenstockError``
        if one cannot start; the processes then remain unloaded."""
        first, *_ = results = await asyncio.gather(*(engine.load() for engine in self._engines), return_exceptions=True)
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            await self.unload()
            raise error
        assert not isinstance(first, BaseException)
        return first

    def stop_restarting(self) -> None:
        """Do not restart processes: on shutdown, a service manager may send SIGTERM to all processes of the group."""
        for engine in [*self._engines, *self._others]:
            engine.restarts = False

    def stop(self) -> None:
        """Begin to stop the engines as ``close`` does, without waiting for their end."""
        self.closing = True
        for engine in [*self._engines, *self._others]:
            engine.stop()

    def kill(self) -> None:
        """Kill all engine processes of the model."""
        for engine in [*self._engines, *self._others]:
            engine.kill()

    def pid(self, replica: int) -> int:
        """Process id of a replica."""
        return self._engines[replica].pid

    def kill_replica(self, replica: int) -> None:
        """Kill a process. ``watch`` then restarts it."""
        self._engines[replica].kill()


async def _check_versions(running: messages.Ready | None) -> bool:
    """True if a new engine process would have the versions of Penstock and PyTorch of the running one. Raises
    ``PenstockError`` (``unsupported``) if this process could not communicate with it."""
    command = [sys.executable, "-P", "-c", VERSIONS]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, start_new_session=True)
    output, _ = await process.communicate()
    if process.returncode:
        raise PenstockError(
            Code.UNSUPPORTED, "the installed version of Penstock cannot be imported; the log has the cause"
        )
    protocol, version, torch = msgspec.json.decode(output)
    if protocol != messages.PROTOCOL:
        raise PenstockError(Code.UNSUPPORTED, f"{OTHER_VERSION}: Penstock {version}")
    return running is not None and running.version == version and f"torch{torch}" in running.fingerprint
