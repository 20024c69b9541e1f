"""Actions on all engines of a model, executed in the process that started the engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeAlias

import msgspec

from penstock.core import Code, Failure, PenstockError

from ..modes import ReloadMode, WeightUpdateMode
from . import messages
from .actions import (
    CommitWeights,
    DiscardWeights,
    EngineAction,
    EngineState,
    LoadWeights,
    PauseGeneration,
    ResumeGeneration,
    Sleep,
    WakeUp,
)
from .client import STOPPING, EngineClient
from .engine_processes import EngineProcesses

logger = logging.getLogger(__name__)

READY_TIMEOUT = 10.0
"""Maximum time to wait for engines that are being restarted, seconds."""
ANNOUNCE_TIMEOUT = 10.0
"""Maximum time to wait until all clients use a new engine, seconds."""
REPLACED = Failure(Code.UNAVAILABLE, "the engine process was replaced by a new one; try again")


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Change the weights of all engines."""

    path: str = ""
    """Folder of a checkpoint of the same model; empty: read the current folder again."""
    running: ReloadMode = "finish"


class RestartEngines(msgspec.Struct, tag=True, frozen=True):
    """Replace each engine process by a new one, which may run a newer version of the installed package."""


ModelAction: TypeAlias = UpdateWeights | RestartEngines | PauseGeneration | ResumeGeneration | Sleep | WakeUp
"""Actions that ``ModelControl`` executes on all engines of a model."""


def starts_engines(action: ModelAction) -> bool:
    """True if an action starts new engine processes."""
    return isinstance(action, RestartEngines) or (isinstance(action, UpdateWeights) and action.running == "restart")


class ModelControl:
    """Executes actions on all engines of a model. Create and use it in one event loop.

    All engines load new weights before any engine uses them. If an engine cannot load them, all keep the old weights;
    with ``restart``, the first engine decides.
    A restarted engine gets the same weights as the other engines, and is paused or sleeps if they do.

    Args:
        announce: called when ``processes.addresses`` have changed; returns when all clients use the new engines.
    """

    def __init__(self, processes: EngineProcesses, announce: Callable[[], Awaitable[None]]) -> None:
        self._processes = processes
        self._announce = announce
        self._clients: list[EngineClient] = []
        self._updating = self._is_replacing = False
        self._num_executing = 0
        self._pause_action: PauseGeneration | Sleep | None = None
        """Current pause or sleep, repeated for restarted engines."""
        self._pids: dict[int, int] = {}
        """Process id of each engine, by replica."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_asleep(self) -> bool:
        """True if the engines sleep."""
        return any(client.engine.state.asleep for client in self._clients if client.engine)

    @property
    def is_busy(self) -> bool:
        """True while an action is executed (``busy``), and while the engines are paused or sleep."""
        return self._num_executing > 0 or self._pause_action is not None

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Context of an action: ``is_busy`` is True."""
        self._num_executing += 1
        try:
            yield
        finally:
            self._num_executing -= 1

    async def execute(self, action: ModelAction) -> EngineState:
        """Execute an action, and return the state of the first engine afterwards. Raises ``PenstockError`` if the
        action fails."""
        if self._is_replacing:
            raise PenstockError(Code.UNAVAILABLE, "the engines are being replaced; try again soon")
        if not self._clients:
            self._clients = [self._client(*entry) for entry in enumerate(self._processes.addresses)]
        try:
            async with asyncio.timeout(READY_TIMEOUT):
                await asyncio.gather(*(client.ready() for client in self._clients))
        except TimeoutError as error:
            if not isinstance(action, RestartEngines):  # which replaces engines that have died too often
                raise PenstockError(Code.UNAVAILABLE, "an engine is being restarted; try again soon") from error
        options = self._processes.options
        try:
            if isinstance(action, RestartEngines):
                await self._replace_engines(self._processes.weights, options.resume)
            elif isinstance(action, UpdateWeights) and action.running == "restart":
                weights = action.path or self._processes.weights
                await self._replace_engines(weights, options.resume and options.resume_across_fingerprints)
            elif isinstance(action, UpdateWeights):
                await self._update_weights(action)
            else:
                if isinstance(action, PauseGeneration | Sleep):
                    self._pause_action = action
                await self._call_all(action)
        finally:
            states = [client.engine.state for client in self._clients if client.engine]
            if not any(state.is_paused for state in states):
                self._pause_action = None
        return states[0] if states else EngineState()

    async def close(self) -> None:
        """Disconnect from the engines."""
        for client in self._clients:
            client.stop_serving(STOPPING)
        await asyncio.gather(*(client.close() for client in self._clients), *self._tasks, return_exceptions=True)

    def _client(self, replica: int, address: str) -> EngineClient:
        return EngineClient(
            address,
            on_deltas=lambda deltas: None,
            on_lost=lambda failure: None,
            get_vocabulary=None,
            on_cancel=lambda request_ids: None,
            on_ready=lambda engine: self._on_ready(replica, engine),
        )

    async def _call_all(self, action: EngineAction) -> None:
        """Execute an action in all engines. Waits for all of them, then raises the first error."""
        calls = [client.call(action) for client in self._clients]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        """Context of a change of the engines. Raises ``PenstockError`` (``unavailable``) during another one."""
        if self._updating:
            message = "a weight update or restart is in progress; wait until it has ended"
            raise PenstockError(Code.UNAVAILABLE, message)
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    async def _replace_engines(self, weights: str, continues: bool) -> None:
        """Replace the engine processes, one after the other.

        Args:
            weights: folder of the weights that the new processes load; empty: the option ``model``.
            continues: True if requests may continue in the new processes.

        Raises ``PenstockError`` if a new process cannot start. If the weights change, that of the first replica
        decides: the others are then restarted with the same weights until they load them.
        """
        if self._pause_action:
            message = "the engine is paused or sleeps: resume it, or wake it up, before you restart it"
            raise PenstockError(Code.UNSUPPORTED, message)
        with self._update():
            self._is_replacing = True
            try:
                for replica in range(len(self._clients)):
                    await self._replace_engine(replica, weights, continues)
            finally:
                self._is_replacing = False

    async def _replace_engine(self, replica: int, weights: str, continues: bool) -> None:
        started, old = time.monotonic(), self._pids.get(replica)
        changes = weights != self._processes.weights_of(replica)
        try:
            await self._processes.replace(replica, weights, continues, partial(self._use_new_engine, replica))
        except PenstockError as error:
            if not replica or not changes:
                raise
            logger.error("engine %d could not be replaced: %s; restarting it", replica, error)
            await self._processes.restart(replica, weights)
        with contextlib.suppress(TimeoutError):  # if it dies again, the launcher restarts it
            async with asyncio.timeout(READY_TIMEOUT):
                await self._clients[replica].ready()
        fields = {"seconds": time.monotonic() - started}
        logger.info("engine process %s was replaced by %d", old, self._processes.pid(replica), extra={"fields": fields})

    async def _use_new_engine(self, replica: int) -> None:
        """Make all clients use the engine process that has replaced another one."""
        old = self._clients[replica]
        new = self._clients[replica] = self._client(replica, self._processes.addresses[replica])
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT):
                await asyncio.gather(self._announce(), new.ready())
        except (TimeoutError, PenstockError) as error:
            reason = str(error) or f"no answer within {ANNOUNCE_TIMEOUT:g} seconds"
            logger.warning("not every client uses the new engine process yet: %s", reason)
        old.stop_serving(REPLACED)
        await old.close()

    async def _update_weights(self, update: UpdateWeights) -> None:
        assert update.running != "restart"
        with self._update():
            try:
                await self._call_all(LoadWeights(update.path))
            except BaseException:
                await asyncio.gather(
                    *(client.call(DiscardWeights()) for client in self._clients), return_exceptions=True
                )
                raise
            await self._commit(update.path, update.running)

    async def _commit(self, path: str, running: WeightUpdateMode) -> None:
        """Use the loaded weights in all engines. Raises an error if all engines fail; if only some fail, restarts
        them."""
        path = path or self._processes.weights

        async def commit(client: EngineClient) -> None:
            await client.call(CommitWeights(running))
            self._processes.weights = path

        results = await asyncio.gather(*map(commit, self._clients), return_exceptions=True)
        failed = {client: error for client, error in zip(self._clients, results, strict=True) if error is not None}
        if len(failed) == len(self._clients):
            raise next(iter(failed.values()))
        for replica, client in enumerate(self._clients):
            if client in failed:
                logger.error("engine %d could not use the weights of %s: %s", replica, path, failed[client])
                if client.engine:
                    self._processes.kill_replica(replica)

    def _on_ready(self, replica: int, engine: messages.Ready) -> None:
        """Called when an engine has connected, and when its state has changed."""
        if self._pids.setdefault(replica, engine.pid) == engine.pid:
            return
        self._pids[replica] = engine.pid  # another process id means that the engine was restarted
        if not self._updating and len(self._clients) > 1 and engine.state.weights_path != self._processes.weights:
            message = "engine %d has the weights %r, the other replicas have %r: restarting it"
            logger.error(message, replica, engine.state.weights_path, self._processes.weights)
            self._processes.kill_replica(replica)
        elif self._pause_action:
            self._spawn(self._repeat_pause(self._clients[replica], self._pause_action))

    async def _repeat_pause(self, client: EngineClient, action: PauseGeneration | Sleep) -> None:
        """Repeat the current pause or sleep in a restarted engine. Does nothing if ``action`` is no longer current."""
        if action is not self._pause_action:
            return
        try:
            await client.call(action)
        except PenstockError as error:
            logger.error("the restarted engine %s could not be paused: %s", client.address, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
